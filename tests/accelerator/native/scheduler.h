// Streams, marks (one recording of an event) and the order in which queued jobs run. No torch headers here.
//
// Nothing in this file locks: the runtime (runtime.h) owns the one lock, and calls everything here under it.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "clock.h"

namespace late {

using Lock = std::unique_lock<std::mutex>;
struct Stream;

// Done once its stream has run everything that was issued before it.
struct Mark {
  Stream* stream = nullptr;
  bool done = false;
  Clock clock;  // what has happened when it is done
};
using MarkPtr = std::shared_ptr<Mark>;

// A piece of work. step() runs under the lock, on any thread. So it must not touch Python, nor drop the last
// reference to something that does, nor wait for anybody: a job that waits for other processes returns false until
// they have answered, and is asked again.
struct Job {
  std::string name;
  std::function<bool()> step;  // empty: nothing to do
  MarkPtr after;               // may not run before this mark is done
  bool network = false;        // other processes wait for it
};

struct Stream {
  int device = 0;
  int64_t id = 0;      // 0 is the device's default stream
  size_t number = 0;   // in clocks
  Clock clock;         // what happens before whatever is issued next
  std::deque<Job> jobs;
  int network_jobs = 0;
  bool capturing = false;  // says a test; nothing is captured
  bool prompt = false;  // in random mode: runs as soon as permitted, or as late as possible
  std::string name() const { return std::to_string(device) + ":" + std::to_string(id); }
};

// Which streams run as soon as permitted; the others run when somebody asks for a result.
enum class Mode {
  Eager,   // all
  Lazy,    // none
  Sides,   // all but the default streams
  Random,  // drawn from the seed for each stream, and redrawn now and then
};

class Scheduler {
 public:
  void set_mode(Mode mode, uint64_t seed);

  Stream* stream(int device, int64_t id);
  Stream* next_of_pool(int device);  // round robin over 32 streams, as accelerators do
  std::vector<Stream*> streams(int device) const;  // all devices: -1

  void push(Stream* stream, Job job);
  MarkPtr record(Stream* stream);

  // What runs without being asked, after something was issued or the network has answered.
  void run_prompt_streams();
  void redraw(Stream* issued);

  // One step towards emptying the stream: its head, or whatever its head waits for. Nothing beyond that.
  bool step_towards(Stream* stream);

  // Lets every stream that holds network jobs come to them, as a device would. Otherwise two ranks could each wait
  // for work that the other one has not been asked to run.
  bool step_networks(Stream* except);

  // Runs what the mark needs until it is done; gives the lock away while only the network can help.
  void run_until(Lock& lock, const MarkPtr& mark);

  // Something outside has changed: whoever sleeps in run_until looks again.
  void notify() { changed_.notify_all(); }

  int network_jobs() const { return network_jobs_; }
  std::string take_error();

 private:
  bool is_prompt(const Stream& stream) const;
  bool run_head(Stream* stream);
  void let_prompt_streams_lead(Lock& lock, Stream* asked);
  bool is_flying(const Stream& stream) const;

  Mode mode_ = Mode::Eager;
  std::mt19937_64 random_{0};
  std::map<std::pair<int, int64_t>, std::unique_ptr<Stream>> streams_;
  std::map<int, int64_t> pool_;
  std::condition_variable changed_;
  int network_jobs_ = 0;
  std::string error_;
};

}  // namespace late
