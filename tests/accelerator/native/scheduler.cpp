#include "scheduler.h"

#include <chrono>
#include <exception>
#include <utility>

namespace late {
namespace {

constexpr int64_t kPoolSize = 32;
constexpr auto kGlance = std::chrono::milliseconds(1);  // how long to sleep before looking at the network again
constexpr int kPatience = 20;                           // glances that a prompt stream's network job may take

}  // namespace

void Scheduler::set_mode(Mode mode, uint64_t seed) {
  mode_ = mode;
  random_.seed(seed);
  for (auto& [key, stream] : streams_) stream->prompt = random_() & 1;
  run_prompt_streams();
}

Stream* Scheduler::stream(int device, int64_t id) {
  auto& slot = streams_[{device, id}];
  if (!slot) {
    slot = std::make_unique<Stream>();
    slot->device = device;
    slot->id = id;
    slot->number = streams_.size() - 1;
    slot->prompt = random_() & 1;
  }
  return slot.get();
}

Stream* Scheduler::next_of_pool(int device) { return stream(device, 1 + pool_[device]++ % kPoolSize); }

std::vector<Stream*> Scheduler::streams(int device) const {
  std::vector<Stream*> found;
  for (auto& [key, stream] : streams_)
    if (device < 0 || stream->device == device) found.push_back(stream.get());
  return found;
}

void Scheduler::push(Stream* stream, Job job) {
  if (job.network) {
    stream->network_jobs++;
    network_jobs_++;
  }
  stream->jobs.push_back(std::move(job));
}

MarkPtr Scheduler::record(Stream* stream) {
  auto mark = std::make_shared<Mark>();
  mark->stream = stream;
  mark->clock = stream->clock;
  if (stream->jobs.empty())
    mark->done = true;
  else
    push(stream, {"record", [mark] { return mark->done = true; }, nullptr, false});
  return mark;
}

// True if the head has ended.
bool Scheduler::run_head(Stream* stream) {
  if (stream->jobs.empty()) return false;
  Job& job = stream->jobs.front();
  if (job.after && !job.after->done) return false;
  bool ended = true;
  try {
    ended = !job.step || job.step();
  } catch (const std::exception& e) {
    if (error_.empty()) error_ = job.name + ": " + e.what();
  }
  if (!ended) return false;
  if (job.network) {
    stream->network_jobs--;
    network_jobs_--;
  }
  stream->jobs.pop_front();
  return true;
}

bool Scheduler::step_towards(Stream* stream) {
  while (!stream->jobs.empty()) {
    const Job& job = stream->jobs.front();
    if (!job.after || job.after->done) return run_head(stream);
    stream = job.after->stream;
  }
  return false;
}

bool Scheduler::step_networks(Stream* except) {
  bool progress = false;
  for (auto& [key, stream] : streams_)
    if (stream.get() != except && stream->network_jobs > 0 && step_towards(stream.get())) progress = true;
  return progress;
}

bool Scheduler::is_prompt(const Stream& stream) const {
  switch (mode_) {
    case Mode::Eager: return true;
    case Mode::Lazy: return false;
    case Mode::Sides: return stream.id != 0;
    case Mode::Random: return stream.prompt;
  }
  return false;
}

void Scheduler::redraw(Stream* issued) {
  if (mode_ == Mode::Random && random_() % 8 == 0) issued->prompt = random_() & 1;
}

void Scheduler::run_prompt_streams() {
  if (mode_ == Mode::Lazy) return;
  for (bool progress = true; progress;) {
    progress = false;
    for (auto& [key, stream] : streams_)
      if (is_prompt(*stream))
        while (run_head(stream.get())) progress = true;
  }
}

// Its head is a network job that has what it needs, so it ends without our help.
bool Scheduler::is_flying(const Stream& stream) const {
  if (stream.jobs.empty()) return false;
  const Job& head = stream.jobs.front();
  return head.network && (!head.after || head.after->done);
}

// Prompt streams also run between the steps of a stream the host waits for, and their network jobs get a moment to
// end first: this is the order in which a missing wait shows.
void Scheduler::let_prompt_streams_lead(Lock& lock, Stream* asked) {
  if (mode_ == Mode::Lazy || mode_ == Mode::Eager) return;
  for (int glances = 0; glances < kPatience; ++glances) {
    run_prompt_streams();
    bool flying = false;
    for (auto& [key, stream] : streams_)
      flying = flying || (stream.get() != asked && is_prompt(*stream) && is_flying(*stream));
    if (!flying) return;
    changed_.wait_for(lock, kGlance);
  }
}

void Scheduler::run_until(Lock& lock, const MarkPtr& mark) {
  while (!mark->done) {
    let_prompt_streams_lead(lock, mark->stream);
    if (mark->done || step_towards(mark->stream)) continue;
    step_networks(mark->stream);
    changed_.wait_for(lock, kGlance);
  }
}

std::string Scheduler::take_error() { return std::exchange(error_, {}); }

}  // namespace late
