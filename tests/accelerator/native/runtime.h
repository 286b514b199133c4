// The device without torch: one lock around streams, memory, clocks and counters. What torch sees of the device
// (guard.cpp, fallback.cpp, operators.cpp, group.cpp) calls nothing else. No torch headers here.
#pragma once
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "counters.h"
#include "memory.h"
#include "races.h"
#include "scheduler.h"

namespace late {

class Runtime {
 public:
  Runtime() : memory_(scheduler_, races_) {}
  ~Runtime() { stop(); }

  // Ends the thread that goes on without the host.
  void stop();

  void set_mode(Mode mode, uint64_t seed);

  Stream* stream(int device, int64_t id);
  Stream* next_of_pool(int device);

  // Queues a job that touches this memory.
  void issue(Stream* stream, Job job, const Accesses& accesses);

  MarkPtr record(Stream* stream);
  // What is issued on the stream from now on comes after the mark.
  void wait(Stream* stream, const MarkPtr& mark);
  // As wait(), but nobody may rely on it: how we keep a communicator's calls in order, which orders no memory.
  void run_after(Stream* stream, const MarkPtr& mark);

  // Whether it is done. Then makes one step of progress, so that polling ends.
  bool query(const MarkPtr& mark);
  bool query(Stream* stream);

  // The host waits. `cause` is what the counter calls it; it does not count if it has none.
  void synchronize(const MarkPtr& mark, const std::string& cause);
  void synchronize(Stream* stream, const std::string& cause);
  void synchronize_device(int device, const std::string& cause);  // all devices: -1
  void settle() { synchronize_device(-1, ""); }

  // The network has answered a job.
  void notify();

  void* allocate(size_t bytes, Stream* home);
  void* allocate_pinned(size_t bytes);
  void free(void* data);
  void record_use(const void* data, Stream* stream);
  bool is_pinned(const void* data);
  int device_of(const void* data);
  Usage usage(int device);
  void reset_peak(int device);

  // Whether what is issued on the stream would be recorded into a graph. Only the question is simulated.
  void set_capturing(Stream* stream, bool capturing);
  bool is_capturing(Stream* stream);

  // Counters, races and what is queued, for tests.
  template <class F>
  void count(F&& update) {
    Lock lock(mutex_);
    update(counters_);
  }
  Counters counters();
  void reset_counters();
  std::vector<Race> take_races();
  std::vector<std::string> pending();

 private:
  void issue_locked(Stream* stream, Job job, const Accesses& accesses);
  void after_issue(Stream* stream);
  void count_synchronisation(const std::string& cause);
  void finish_waiting(Lock& lock, const Clock& clock);
  void start_pump();
  void pump();

  std::mutex mutex_;
  Scheduler scheduler_;
  RaceDetector races_;
  MemoryPool memory_;
  Counters counters_;
  Clock host_;  // what the host has waited for; threads hand this on to each other in ways that we do not see
  std::thread pump_;
  std::atomic<bool> stopping_{false};
  std::atomic<int64_t> active_at_{0};  // when a thread of the program last did something here, in milliseconds
};

// The device's own. Others are made by tests.
Runtime& runtime();

// What torch keeps for each thread: the current device and its current stream.
int device_count();
int current_device();
void set_current_device(int device);
Stream* current_stream(int device);
void set_current_stream(Stream* stream);

}  // namespace late
