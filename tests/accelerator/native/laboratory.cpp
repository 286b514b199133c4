// The parts without torch for their tests: a runtime of its own whose jobs note that they ran, in memory of integers.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <mutex>
#include <stdexcept>

#include "runtime.h"

namespace late {
namespace {

namespace py = pybind11;
using Intervals = std::vector<std::pair<uintptr_t, uintptr_t>>;

class Laboratory {
 public:
  void stop() { runtime_.stop(); }
  void set_mode(Mode mode, uint64_t seed) { runtime_.set_mode(mode, seed); }

  void issue(int64_t stream, const std::string& name, const Intervals& reads, const Intervals& writes) {
    auto job = [this, name] {
      Noted noted(notes_);
      ran_.push_back(name);
      return true;
    };
    runtime_.issue(at(stream), {name, job, nullptr, false}, {ranges(reads), ranges(writes)});
  }
  // A job that ends when the network answers.
  void issue_network(int64_t stream, const std::string& name) {
    auto job = [this, name] {
      Noted noted(notes_);
      if (!answered_.count(name)) {
        begun_.insert(name);
        return false;
      }
      ran_.push_back(name);
      return true;
    };
    runtime_.issue(at(stream), {name, job, nullptr, true}, {});
  }
  void answer(const std::string& name) {
    {
      Noted noted(notes_);
      answered_.insert(name);
    }
    runtime_.notify();
  }
  void fail(int64_t stream, const std::string& name) {
    auto job = []() -> bool { throw std::runtime_error("broken"); };
    runtime_.issue(at(stream), {name, job, nullptr, false}, {});
  }

  MarkPtr record(int64_t stream) { return runtime_.record(at(stream)); }
  void wait(int64_t stream, const MarkPtr& mark) { runtime_.wait(at(stream), mark); }
  void run_after(int64_t stream, const MarkPtr& mark) { runtime_.run_after(at(stream), mark); }
  bool query(const MarkPtr& mark) { return runtime_.query(mark); }
  void synchronize(int64_t stream) { runtime_.synchronize(at(stream), "stream"); }
  void synchronize_mark(const MarkPtr& mark) { runtime_.synchronize(mark, "mark"); }

  uintptr_t allocate(size_t bytes, int64_t stream) {
    return reinterpret_cast<uintptr_t>(runtime_.allocate(bytes, at(stream)));
  }
  void free(uintptr_t address) { runtime_.free(reinterpret_cast<void*>(address)); }
  void record_use(uintptr_t address, int64_t stream) {
    runtime_.record_use(reinterpret_cast<void*>(address), at(stream));
  }

  std::vector<std::string> ran() {
    Noted noted(notes_);
    return ran_;
  }
  std::set<std::string> begun() {
    Noted noted(notes_);
    return begun_;
  }
  std::vector<std::tuple<std::string, std::string>> races() {
    std::vector<std::tuple<std::string, std::string>> found;
    for (const Race& race : runtime_.take_races()) found.emplace_back(race.first, race.second);
    return found;
  }
  std::map<std::string, int64_t> synchronisations() { return runtime_.counters().synchronisations; }

 private:
  Stream* at(int64_t stream) { return runtime_.stream(0, stream); }
  static std::vector<Range> ranges(const Intervals& intervals) {
    std::vector<Range> found;
    for (auto [begin, end] : intervals) found.push_back({begin, end});
    return found;
  }

  using Noted = std::lock_guard<std::mutex>;  // jobs run on the runtime's thread, too
  std::mutex notes_;
  std::vector<std::string> ran_;
  std::set<std::string> begun_, answered_;
  Runtime runtime_;  // last: its thread ends before what its jobs use
};

}  // namespace

void bind_laboratory(py::module_& m) {
  py::class_<Mark, MarkPtr>(m, "Mark").def_readonly("done", &Mark::done);
  py::class_<Laboratory>(m, "Laboratory")
      .def(py::init<>())
      .def("stop", &Laboratory::stop)
      .def("set_mode", &Laboratory::set_mode)
      .def("issue", &Laboratory::issue, py::arg("stream"), py::arg("name"), py::arg("reads") = Intervals(),
           py::arg("writes") = Intervals())
      .def("issue_network", &Laboratory::issue_network)
      .def("answer", &Laboratory::answer)
      .def("fail", &Laboratory::fail)
      .def("record", &Laboratory::record)
      .def("wait", &Laboratory::wait)
      .def("run_after", &Laboratory::run_after)
      .def("query", &Laboratory::query)
      .def("synchronize", &Laboratory::synchronize, py::call_guard<py::gil_scoped_release>())
      .def("synchronize_mark", &Laboratory::synchronize_mark, py::call_guard<py::gil_scoped_release>())
      .def("allocate", &Laboratory::allocate)
      .def("free", &Laboratory::free)
      .def("record_use", &Laboratory::record_use)
      .def("ran", &Laboratory::ran)
      .def("begun", &Laboratory::begun)
      .def("races", &Laboratory::races)
      .def("synchronisations", &Laboratory::synchronisations);
}

}  // namespace late
