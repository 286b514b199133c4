#include "runtime.h"

#include <chrono>
#include <cstdlib>
#include <map>
#include <stdexcept>
#include <utility>

namespace late {
namespace {

// A host that has been idle here for so long is blocked elsewhere (a store, a barrier on the CPU, a message), and
// peers may need its part of a collective for it to go on.
constexpr int64_t kIdleHost = 50;

int64_t now_in_milliseconds() {
  using namespace std::chrono;
  return duration_cast<milliseconds>(steady_clock::now().time_since_epoch()).count();
}

}  // namespace

void Runtime::stop() {
  stopping_ = true;
  if (pump_.joinable()) pump_.join();
}

void Runtime::set_mode(Mode mode, uint64_t seed) {
  Lock lock(mutex_);
  scheduler_.set_mode(mode, seed);
}

Stream* Runtime::stream(int device, int64_t id) {
  Lock lock(mutex_);
  return scheduler_.stream(device, id);
}

Stream* Runtime::next_of_pool(int device) {
  Lock lock(mutex_);
  return scheduler_.next_of_pool(device);
}

void Runtime::issue(Stream* stream, Job job, const Accesses& accesses) {
  Lock lock(mutex_);
  for (Block* block : memory_.overwritten_by(accesses.writes)) {
    auto scribble = [this, block] {
      memory_.scribble(block);
      return true;
    };
    issue_locked(stream, {"reuse of freed memory by " + job.name, scribble, nullptr, false}, {{}, {block->range()}});
  }
  if (job.network)
    start_pump();
  else
    counters_.streams[stream->name()]++;
  issue_locked(stream, std::move(job), accesses);
  after_issue(stream);
}

void Runtime::issue_locked(Stream* stream, Job job, const Accesses& accesses) {
  stream->clock.join(host_);
  Moment moment = stream->clock.tick(stream->number);
  auto actor = std::make_shared<const Actor>(Actor{job.name, stream->name(), moment});
  races_.access(actor, stream->clock, accesses);
  scheduler_.push(stream, std::move(job));
}

void Runtime::after_issue(Stream* stream) {
  active_at_ = now_in_milliseconds();
  scheduler_.redraw(stream);
  scheduler_.run_prompt_streams();
}

MarkPtr Runtime::record(Stream* stream) {
  Lock lock(mutex_);
  auto mark = scheduler_.record(stream);
  after_issue(stream);
  return mark;
}

void Runtime::wait(Stream* stream, const MarkPtr& mark) {
  if (!mark) return;
  Lock lock(mutex_);
  stream->clock.join(mark->clock);  // also if it is done: that it was is luck
  if (mark->done || mark->stream == stream) return;
  scheduler_.push(stream, {"wait", nullptr, mark, false});
  after_issue(stream);
}

void Runtime::run_after(Stream* stream, const MarkPtr& mark) {
  if (!mark) return;
  Lock lock(mutex_);
  if (!mark->done && mark->stream != stream) scheduler_.push(stream, {"order", nullptr, mark, false});
}

bool Runtime::query(const MarkPtr& mark) {
  if (!mark) return true;
  Lock lock(mutex_);
  if (mark->done) {
    active_at_ = now_in_milliseconds();
    host_.join(mark->clock);
    return true;
  }
  scheduler_.step_towards(mark->stream);
  return false;
}

bool Runtime::query(Stream* stream) {
  Lock lock(mutex_);
  if (stream->jobs.empty()) {
    active_at_ = now_in_milliseconds();
    host_.join(stream->clock);
    return true;
  }
  scheduler_.step_towards(stream);
  return false;
}

void Runtime::synchronize(const MarkPtr& mark, const std::string& cause) {
  if (!mark) return;
  Lock lock(mutex_);
  count_synchronisation(cause);
  scheduler_.run_until(lock, mark);
  finish_waiting(lock, mark->clock);
}

void Runtime::synchronize(Stream* stream, const std::string& cause) {
  Lock lock(mutex_);
  count_synchronisation(cause);
  auto mark = scheduler_.record(stream);
  scheduler_.run_until(lock, mark);
  finish_waiting(lock, mark->clock);
}

void Runtime::synchronize_device(int device, const std::string& cause) {
  Lock lock(mutex_);
  count_synchronisation(cause);
  std::vector<MarkPtr> marks;
  for (Stream* stream : scheduler_.streams(device)) marks.push_back(scheduler_.record(stream));
  Clock all;
  for (const MarkPtr& mark : marks) {
    scheduler_.run_until(lock, mark);
    all.join(mark->clock);
  }
  finish_waiting(lock, all);
}

void Runtime::count_synchronisation(const std::string& cause) {
  if (!cause.empty()) counters_.synchronisations[cause]++;
}

void Runtime::finish_waiting(Lock& lock, const Clock& clock) {
  host_.join(clock);
  active_at_ = now_in_milliseconds();
  memory_.collect();
  std::string error = scheduler_.take_error();
  if (error.empty()) return;
  lock.unlock();
  throw std::runtime_error("late device: asynchronous failure of " + error);
}

void Runtime::notify() {
  Lock lock(mutex_);
  scheduler_.notify();
}

// A device needs no host to go on. This thread does what is left to do when no thread of the program is here: it runs
// prompt streams on when the network has answered, and network jobs of others when the host is idle.
void Runtime::start_pump() {
  if (!pump_.joinable()) pump_ = std::thread([this] { pump(); });
}

void Runtime::pump() {
  while (!stopping_) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    Lock lock(mutex_);
    if (scheduler_.network_jobs() == 0) continue;
    scheduler_.run_prompt_streams();
    if (now_in_milliseconds() - active_at_ <= kIdleHost) continue;
    while (scheduler_.step_networks(nullptr)) {
    }
  }
}

void* Runtime::allocate(size_t bytes, Stream* home) {
  Lock lock(mutex_);
  return memory_.allocate(bytes, home);
}

void* Runtime::allocate_pinned(size_t bytes) {
  Lock lock(mutex_);
  return memory_.allocate_pinned(bytes);
}

void Runtime::free(void* data) {
  Lock lock(mutex_);
  memory_.free(data);
}

void Runtime::record_use(const void* data, Stream* stream) {
  Lock lock(mutex_);
  memory_.record_use(data, stream);
}

bool Runtime::is_pinned(const void* data) {
  Lock lock(mutex_);
  return memory_.is_pinned(data);
}

int Runtime::device_of(const void* data) {
  Lock lock(mutex_);
  return memory_.device_of(data);
}

Usage Runtime::usage(int device) {
  Lock lock(mutex_);
  return memory_.usage(device);
}

void Runtime::reset_peak(int device) {
  Lock lock(mutex_);
  memory_.usage(device).peak = memory_.usage(device).current;
}

void Runtime::set_capturing(Stream* stream, bool capturing) {
  Lock lock(mutex_);
  stream->capturing = capturing;
}

bool Runtime::is_capturing(Stream* stream) {
  Lock lock(mutex_);
  return stream->capturing;
}

Counters Runtime::counters() {
  Lock lock(mutex_);
  return counters_;
}

void Runtime::reset_counters() {
  Lock lock(mutex_);
  counters_ = Counters();
}

std::vector<Race> Runtime::take_races() {
  Lock lock(mutex_);
  return races_.take();
}

std::vector<std::string> Runtime::pending() {
  Lock lock(mutex_);
  std::vector<std::string> found;
  for (Stream* stream : scheduler_.streams(-1))
    for (const Job& job : stream->jobs) found.push_back(stream->name() + " " + job.name);
  return found;
}

Runtime& runtime() {
  // Never destroyed: tensors outlive static objects. Its thread is stopped before the interpreter goes (module.cpp).
  static Runtime* one = new Runtime;
  return *one;
}

int device_count() {
  static const int count = [] {
    const char* value = std::getenv("LATE_DEVICES");
    return value ? std::atoi(value) : 2;
  }();
  return count;
}

namespace {
thread_local int this_device = 0;
thread_local std::map<int, Stream*> these_streams;
}  // namespace

int current_device() { return this_device; }
void set_current_device(int device) { this_device = device; }

Stream* current_stream(int device) {
  Stream*& stream = these_streams[device];
  if (!stream) stream = runtime().stream(device, 0);
  return stream;
}

void set_current_stream(Stream* stream) { these_streams[stream->device] = stream; }

}  // namespace late
