// A c10d backend for the device: collectives are queued like kernels, carried by gloo, and waiting for one blocks the
// current stream, not the host.
#include <ATen/core/ivalue.h>
#include <ATen/ops/cat.h>
#include <c10/core/StreamGuard.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <cstring>

#include "carriers.h"
#include "tensors.h"

// How torch's bindings hold a backend.
PYBIND11_DECLARE_HOLDER_TYPE(T, c10::intrusive_ptr<T>, true)

namespace late {
namespace {

using at::Tensor;
using c10d::Backend;
using c10d::OpType;
using c10d::ReduceOp;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<Tensor>;

Carriers& carriers() {
  static auto* all = new Carriers;  // its threads outlive static objects
  return *all;
}

// One call of gloo. It gets dense host tensors: inputs as the device's memory is when the job begins; outputs are
// copied to the device when the call has ended.
struct Part {
  Tensors in, out;        // aliases of device memory
  bool in_place = false;  // outputs are inputs, too
  std::function<WorkPtr(Tensors& in, Tensors& out)> start;
  int64_t divisor = 1;  // gloo has no average
  int64_t spared = 0, spared_end = 0;  // bytes of the only output that are left alone
  Tensors host_in, host_out;

  void begin() {
    for (const Tensor& t : in) host_in.push_back(t.clone(at::MemoryFormat::Contiguous));
    for (const Tensor& t : out) {
      host_out.push_back(in_place ? t.clone(at::MemoryFormat::Contiguous) : at::empty(t.sizes(), t.options()));
      // A receive buffer may be written at any time from now on.
      if (in_place || !t.is_non_overlapping_and_dense() || !t.numel()) continue;
      auto* data = static_cast<char*>(t.data_ptr());
      std::memset(data, 0xFF, spared);
      std::memset(data + spared_end, 0xFF, t.nbytes() - spared_end);
    }
  }
  void end() {
    if (spared_end > spared) return end_beside();
    for (size_t i = 0; i < out.size(); ++i) out[i].copy_(divisor > 1 ? host_out[i].div_(divisor) : host_out[i]);
  }
  void end_beside() {
    auto* to = static_cast<char*>(out[0].data_ptr());
    const auto* from = static_cast<const char*>(host_out[0].data_ptr());
    std::memcpy(to, from, spared);
    std::memcpy(to + spared_end, from + spared_end, out[0].nbytes() - spared_end);
  }
};

// The calls of one job, on their way.
class Flight : public std::enable_shared_from_this<Flight> {
 public:
  explicit Flight(std::vector<Part> parts) : parts_(std::move(parts)) {}

  // The job's step: true when everything has arrived.
  bool step() {
    KernelScope scope;
    if (state_ == State::Waiting) {
      state_ = State::Flying;
      for (Part& part : parts_) part.begin();
      carriers().run([self = shared_from_this()] { self->fly(); });
    }
    if (state_ == State::Flying) return false;
    if (state_ == State::Failed) throw std::runtime_error(error_);
    for (Part& part : parts_) part.end();
    return true;
  }

 private:
  enum class State { Waiting, Flying, Arrived, Failed };

  // On a carrier. All are started before one is waited for, else two ranks could send to each other for ever.
  void fly() {
    State reached = State::Arrived;
    try {
      std::vector<WorkPtr> works;
      for (Part& part : parts_) works.push_back(part.start(part.host_in, part.host_out));
      for (auto& work : works) work->wait();
    } catch (const std::exception& e) {
      error_ = e.what();
      reached = State::Failed;
    }
    state_ = reached;
    runtime().notify();
  }

  std::vector<Part> parts_;
  std::string error_;
  std::atomic<State> state_{State::Waiting};
};

struct LateWork final : c10d::Work {
  LateWork(int rank, OpType type, int device, Tensors kept, Tensors outputs)
      : Work(rank, type), device_(device), kept_(std::move(kept)), outputs_(std::move(outputs)) {}

  void start(Stream* stream, bool blocks_host) {
    stream_ = stream;
    mark_ = runtime().record(stream);
    blocks_host_ = blocks_host;
  }
  const MarkPtr& mark() const { return mark_; }

  void synchronize() override {
    runtime().wait(current_stream(device_), mark_);
    kept_.clear();
    if (blocks_host_) runtime().synchronize(mark_, "barrier");
  }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  void blockCurrentStream() override { synchronize(); }
  bool isCompleted() override { return runtime().query(mark_); }
  bool isSuccess() const override { return true; }
  Tensors result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    c10::Device device(kLate, static_cast<c10::DeviceIndex>(device_));
    auto type = c10::ListType::create(c10::TensorType::get());
    auto future = c10::make_intrusive<c10::ivalue::Future>(type, std::vector<c10::Device>{device});
    c10::OptionalStreamGuard guard;  // the future's events are recorded on the stream that carries it
    if (stream_) guard.reset_stream(torchs(stream_));
    future->markCompleted(c10::IValue(outputs_));
    return future;
  }

 private:
  int device_;
  Stream* stream_ = nullptr;
  MarkPtr mark_;
  bool blocks_host_ = false;
  Tensors kept_, outputs_;  // the program's tensors stay alive until wait(), as with NCCL
};

// What is asked of a group, before it is queued.
struct Request {
  std::string name;
  OpType type;
  Tensors in, out;
  std::vector<Part> parts;
  bool async_op = true;  // else on the current stream, as NCCL does
  int64_t channel = 0;   // whose stream carries it if it is asynchronous
  Tensors written = {};  // parts of the outputs, if not all of them are
};

int64_t bytes_of(const Tensors& tensors) {
  int64_t bytes = 0;
  for (const Tensor& t : tensors) bytes += static_cast<int64_t>(t.nbytes());
  return bytes;
}

class Group final : public Backend {
 public:
  explicit Group(c10::intrusive_ptr<Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)), channel_(next_channel()) {}

  const std::string getBackendName() const override { return "late"; }
  bool supportsCoalescing() const override { return true; }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  void shutdown() override { runtime().settle(); }  // peers may need what is queued

  WorkPtr broadcast(Tensors& t, const c10d::BroadcastOptions& o) override {
    Part p = part({}, t, [g = gloo_, o](Tensors&, Tensors& out) { return g->broadcast(out, o); });
    p.in_place = true;
    return submit({"broadcast", OpType::BROADCAST, {}, t, {p}, o.asyncOp});
  }
  WorkPtr allreduce(Tensors& t, const c10d::AllreduceOptions& o) override {
    return submit({"all_reduce", OpType::ALLREDUCE, {}, t, {reduced(t, o)}, o.asyncOp});
  }
  WorkPtr allreduce_coalesced(Tensors& t, const c10d::AllreduceCoalescedOptions& o) override {
    std::vector<Part> parts;
    for (const Tensor& each : t) parts.push_back(reduced({each}, o));
    return submit({"all_reduce_coalesced", OpType::COALESCED, {}, t, parts, o.asyncOp});
  }
  WorkPtr reduce(Tensors& t, const c10d::ReduceOptions& options) override {
    auto o = options;
    const int64_t divisor = without_average(o.reduceOp);
    Part p = part({}, t, [g = gloo_, o](Tensors&, Tensors& out) { return g->reduce(out, o); });
    p.in_place = true;
    p.divisor = getRank() == o.rootRank ? divisor : 1;
    return submit({"reduce", OpType::REDUCE, {}, t, {p}, o.asyncOp});
  }
  WorkPtr allgather(std::vector<Tensors>& outs, Tensors& in, const c10d::AllgatherOptions& o) override {
    Part p = part(in, outs.at(0), [g = gloo_, o](Tensors& i, Tensors& out) {
      std::vector<Tensors> lists{out};
      return g->allgather(lists, i, o);
    });
    return submit({"all_gather", OpType::ALLGATHER, in, outs.at(0), {p}, o.asyncOp});
  }
  WorkPtr _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& o) override {
    Request request{"all_gather_single", OpType::_ALLGATHER_BASE, {in}, {out}, {gathered(out, in, o)}, o.asyncOp};
    if (lies_in(out, in)) leave_alone(request, in);
    return submit(std::move(request));
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outs, Tensors& ins, const c10d::AllgatherOptions& o) override {
    std::vector<Part> parts;
    for (size_t i = 0; i < ins.size(); ++i) parts.push_back(gathered(outs[i], ins[i], o));
    return submit({"all_gather_coalesced", OpType::COALESCED, ins, outs, parts, o.asyncOp});
  }
  WorkPtr _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& o) override {
    Part p = scattered(out, {in}, o);
    return submit({"reduce_scatter_single", OpType::_REDUCE_SCATTER_BASE, {in}, {out}, {p}, o.asyncOp});
  }
  WorkPtr reduce_scatter(Tensors& out, std::vector<Tensors>& ins, const c10d::ReduceScatterOptions& o) override {
    Part p = scattered(out.at(0), ins.at(0), o);
    return submit({"reduce_scatter", OpType::REDUCE_SCATTER, ins.at(0), out, {p}, o.asyncOp});
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outs, Tensors& ins, const c10d::ReduceScatterOptions& o) override {
    std::vector<Part> parts;
    for (size_t i = 0; i < ins.size(); ++i) parts.push_back(scattered(outs[i], {ins[i]}, o));
    return submit({"reduce_scatter_coalesced", OpType::COALESCED, ins, outs, parts, o.asyncOp});
  }
  WorkPtr alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& out_sizes, std::vector<int64_t>& in_sizes,
                        const c10d::AllToAllOptions& o) override {
    Part p = part({in}, {out}, [g = gloo_, o, out_sizes, in_sizes](Tensors& i, Tensors& t) mutable {
      return g->alltoall_base(t[0], i[0], out_sizes, in_sizes, o);
    });
    return submit({"all_to_all_single", OpType::ALLTOALL_BASE, {in}, {out}, {p}, o.asyncOp});
  }
  WorkPtr gather(std::vector<Tensors>& outs, Tensors& in, const c10d::GatherOptions& o) override {
    const Tensors out = outs.empty() ? Tensors() : outs[0];
    Part p = part(in, out, [g = gloo_, o](Tensors& i, Tensors& t) {
      std::vector<Tensors> lists;
      if (!t.empty()) lists.push_back(t);
      return g->gather(lists, i, o);
    });
    return submit({"gather", OpType::GATHER, in, out, {p}, o.asyncOp});
  }
  WorkPtr scatter(Tensors& out, std::vector<Tensors>& ins, const c10d::ScatterOptions& o) override {
    const Tensors in = ins.empty() ? Tensors() : ins[0];
    Part p = part(in, out, [g = gloo_, o](Tensors& i, Tensors& t) {
      std::vector<Tensors> lists;
      if (!i.empty()) lists.push_back(i);
      return g->scatter(t, lists, o);
    });
    return submit({"scatter", OpType::SCATTER, in, out, {p}, o.asyncOp});
  }
  // Single sends and receives have a stream for each peer, as with NCCL: two ranks may send to each other.
  WorkPtr send(Tensors& t, int peer, int tag) override {
    Part p = part(t, {}, [g = gloo_, peer, tag](Tensors& in, Tensors&) { return g->send(in, peer, tag); });
    return submit({"send", OpType::SEND, t, {}, {p}, true, 1 + peer});
  }
  WorkPtr recv(Tensors& t, int peer, int tag) override {
    Part p = part({}, t, [g = gloo_, peer, tag](Tensors&, Tensors& out) { return g->recv(out, peer, tag); });
    return submit({"recv", OpType::RECV, {}, t, {p}, true, 1 + peer});
  }
  void startCoalescing() override {
    batch_ = Request{"coalesced", OpType::COALESCED, {}, {}, {}, true};
  }
  WorkPtr endCoalescing() override {
    Request all = std::move(*batch_);
    batch_.reset();
    return all.parts.empty() ? nullptr : submit(std::move(all));
  }
  WorkPtr barrier(const c10d::BarrierOptions& o) override {
    Part p = part({}, {}, [g = gloo_, o](Tensors&, Tensors&) { return g->barrier(o); });
    return submit({"barrier", OpType::BARRIER, {}, {}, {p}, o.asyncOp});
  }

 private:
  using Start = std::function<WorkPtr(Tensors&, Tensors&)>;

  static int64_t next_channel() {
    static std::atomic<int64_t> next{0};
    return 1000 * ++next;  // ids of streams: no group has so many ranks
  }

  static Part part(const Tensors& in, const Tensors& out, Start start) {
    Part p;
    for (const Tensor& t : in) p.in.push_back(host_alias(t));
    for (const Tensor& t : out) p.out.push_back(host_alias(t));
    p.start = std::move(start);
    return p;
  }
  // gloo sums; we divide.
  int64_t without_average(ReduceOp& op) const {
    TORCH_CHECK(op.op_ != ReduceOp::PREMUL_SUM, "late: PREMUL_SUM is not supported");
    if (op.op_ != ReduceOp::AVG) return 1;
    op = ReduceOp::SUM;
    return getSize();
  }
  Part reduced(const Tensors& t, c10d::AllreduceOptions o) {
    const int64_t divisor = without_average(o.reduceOp);
    Part p = part({}, t, [g = gloo_, o](Tensors&, Tensors& out) { return g->allreduce(out, o); });
    p.in_place = true;
    p.divisor = divisor;
    return p;
  }
  Part gathered(const Tensor& out, const Tensor& in, const c10d::AllgatherOptions& o) {
    return part({in}, {out}, [g = gloo_, o](Tensors& i, Tensors& t) { return g->_allgather_base(t[0], i[0], o); });
  }
  Part scattered(const Tensor& out, const Tensors& in, c10d::ReduceScatterOptions o) {
    const int64_t divisor = without_average(o.reduceOp);
    Part p = part(in, {out}, [g = gloo_, o](Tensors& i, Tensors& t) {
      Tensor whole = i.size() == 1 ? i[0] : at::cat(i);
      return g->_reduce_scatter_base(t[0], whole, o);
    });
    p.divisor = divisor;
    return p;
  }

  // As with NCCL: what this rank brings lies where it belongs, and is not written.
  bool lies_in(const Tensor& out, const Tensor& in) const {
    const bool flat = out.is_contiguous() && in.is_contiguous() && in.numel() && getSize() > 1;
    return flat && in.data_ptr() == static_cast<char*>(out.data_ptr()) + getRank() * in.nbytes();
  }
  void leave_alone(Request& request, const Tensor& in) const {
    Part& part = request.parts[0];
    part.spared = static_cast<int64_t>(getRank() * in.nbytes());
    part.spared_end = part.spared + static_cast<int64_t>(in.nbytes());
    const Tensor flat = request.out[0].view(-1);
    const int64_t begin = getRank() * in.numel(), end = begin + in.numel();
    request.written = {flat.narrow(0, 0, begin), flat.narrow(0, end, flat.numel() - end)};
  }

  WorkPtr submit(Request request) {
    if (batch_) return add_to_batch(std::move(request));
    ++sequence_;
    Tensors kept = request.in;
    kept.insert(kept.end(), request.out.begin(), request.out.end());
    const int device = kept.empty() ? current_device() : kept[0].device().index();
    Stream* current = current_stream(device);
    Stream* stream = request.async_op ? runtime().stream(device, channel_ + request.channel) : current;
    if (stream != current) runtime().wait(stream, runtime().record(current));
    // One communicator carries its calls in the order of issue, whichever streams they are on.
    const bool in_order = request.channel == 0;
    if (in_order) runtime().run_after(stream, last_);
    issue(stream, request);
    auto work = c10::make_intrusive<LateWork>(getRank(), request.type, device, std::move(kept), request.out);
    work->start(stream, request.type == OpType::BARRIER);
    if (in_order) last_ = work->mark();
    return work;
  }

  void issue(Stream* stream, const Request& request) {
    Accesses touched;
    for (const Tensor& t : request.in) add_ranges(touched.reads, t);
    for (const Tensor& t : request.written.empty() ? request.out : request.written) add_ranges(touched.writes, t);
    const int64_t bytes = std::max(bytes_of(request.in), bytes_of(request.out));
    runtime().count([&](Counters& counters) { counters.communicated(request.name, bytes); });
    auto flight = std::make_shared<Flight>(request.parts);
    runtime().issue(stream, {"c10d::" + request.name, [flight] { return flight->step(); }, nullptr, true}, touched);
  }

  WorkPtr add_to_batch(Request request) {
    auto append = [](auto& to, const auto& from) { to.insert(to.end(), from.begin(), from.end()); };
    append(batch_->in, request.in);
    append(batch_->out, request.out);
    append(batch_->parts, request.parts);
    return c10::make_intrusive<LateWork>(getRank(), request.type, current_device(), Tensors(), request.out);
  }

  c10::intrusive_ptr<Backend> gloo_;
  int64_t channel_;
  std::optional<Request> batch_;
  uint64_t sequence_ = 0;
  MarkPtr last_;
};

}  // namespace

void bind_group(pybind11::module_& m) {
  m.def("make_group", [](const c10::intrusive_ptr<Backend>& gloo) -> c10::intrusive_ptr<Backend> {
    return c10::make_intrusive<Group>(gloo);
  });
}

}  // namespace late
