#include "races.h"

#include <algorithm>
#include <sstream>
#include <utility>

namespace late {

std::string Race::describe() const {
  std::ostringstream out;
  out << second << " on stream " << second_stream << (second_writes ? " writes" : " reads") << " memory at 0x" << std::hex
      << address << std::dec << " that " << first << " on stream " << first_stream
      << (first_writes ? " writes" : " reads") << ", and nothing orders them";
  return out.str();
}

void RaceDetector::access(const ActorPtr& actor, const Clock& clock, const Accesses& accesses) {
  // Reads first: what a job overwrites itself it has read before.
  for (const Range& range : accesses.reads) read(actor, clock, range);
  for (const Range& range : accesses.writes) write(actor, clock, range);
}

void RaceDetector::read(const ActorPtr& actor, const Clock& clock, Range range) {
  if (range.begin >= range.end) return;
  fill_gaps(range);
  for (auto it = segments_.find(range.begin); it != segments_.end() && it->first < range.end; ++it) {
    Segment& segment = it->second;
    if (segment.write) check(segment.write, true, actor, false, clock, it->first);
    // Whoever comes after the last read of a stream also comes after the earlier ones.
    auto same_stream = [&](const ActorPtr& r) { return r->moment.stream == actor->moment.stream; };
    auto mine = std::find_if(segment.reads.begin(), segment.reads.end(), same_stream);
    if (mine == segment.reads.end())
      segment.reads.push_back(actor);
    else
      *mine = actor;
  }
}

void RaceDetector::write(const ActorPtr& actor, const Clock& clock, Range range) {
  if (range.begin >= range.end) return;
  auto first = cut(range.begin);
  auto last = cut(range.end);
  for (auto it = first; it != last; ++it) {
    const Segment& segment = it->second;
    if (segment.write) check(segment.write, true, actor, true, clock, it->first);
    for (const ActorPtr& reader : segment.reads) check(reader, false, actor, true, clock, it->first);
  }
  segments_.erase(first, last);
  segments_[range.begin] = Segment{range.end, actor, {}};
}

void RaceDetector::check(const ActorPtr& before, bool before_writes, const ActorPtr& now, bool now_writes,
                         const Clock& clock, uintptr_t address) {
  if (clock.includes(before->moment)) return;
  // A missing wait shows in every step and for every parameter: one report for a pair of operators will do.
  if (!reported_.insert({before->job, before->stream, now->job, now->stream}).second) return;
  races_.push_back({before->job, before->stream, before_writes, now->job, now->stream, now_writes, address});
}

// Makes a segment begin at the address, if one covers it. Returns the first one at or after it.
RaceDetector::Segments::iterator RaceDetector::cut(uintptr_t address) {
  auto next = segments_.lower_bound(address);
  if (next == segments_.begin() || (next != segments_.end() && next->first == address)) return next;
  auto before = std::prev(next);
  if (before->second.end <= address) return next;
  Segment rest = before->second;
  before->second.end = address;
  return segments_.emplace_hint(next, address, std::move(rest));
}

// Covers the range with segments, cut at both ends.
void RaceDetector::fill_gaps(Range range) {
  auto it = cut(range.begin);
  cut(range.end);
  uintptr_t at = range.begin;
  while (at < range.end) {
    if (it != segments_.end() && it->first == at) {
      at = it->second.end;
      ++it;
      continue;
    }
    uintptr_t end = it == segments_.end() ? range.end : std::min(range.end, it->first);
    segments_.emplace_hint(it, at, Segment{end, nullptr, {}});
    at = end;
  }
}

void RaceDetector::forget(Range range) {
  auto first = cut(range.begin);
  segments_.erase(first, cut(range.end));
}

void RaceDetector::settle(Range range, const Clock& clock) {
  auto ended = [&](const ActorPtr& actor) { return clock.includes(actor->moment); };
  auto last = cut(range.end);
  for (auto it = cut(range.begin); it != last; ++it) {
    Segment& segment = it->second;
    if (segment.write && ended(segment.write)) segment.write = nullptr;
    auto& reads = segment.reads;
    reads.erase(std::remove_if(reads.begin(), reads.end(), ended), reads.end());
  }
}

std::vector<Race> RaceDetector::take() {
  reported_.clear();
  return std::exchange(races_, {});
}

}  // namespace late
