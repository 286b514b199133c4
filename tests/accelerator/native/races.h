// The happens-before checker: remembers who touched which memory last, and finds pairs that nothing orders.
//
// It looks at what was issued and never at what has run, so a race is found in every order of execution,
// also in the one that happens to give the right numbers. No torch headers here.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "clock.h"

namespace late {

struct Range {
  uintptr_t begin = 0;
  uintptr_t end = 0;  // exclusive
};

// What a job does to memory. A range that is read and written is a write.
struct Accesses {
  std::vector<Range> reads;
  std::vector<Range> writes;
};

// A job, as far as a report is concerned.
struct Actor {
  std::string job;
  std::string stream;
  Moment moment;
};
using ActorPtr = std::shared_ptr<const Actor>;

// Two jobs that touch the same memory, at least one of them writing, in no certain order.
struct Race {
  std::string first, first_stream;  // the one that was issued first
  bool first_writes = false;
  std::string second, second_stream;
  bool second_writes = false;
  uintptr_t address = 0;
  std::string describe() const;
};

class RaceDetector {
 public:
  // `clock` is what happens before the actor's job, the job itself included.
  void access(const ActorPtr& actor, const Clock& clock, const Accesses& accesses);

  // This memory is handed out anew: nobody's past matters.
  void forget(Range range);

  // What `clock` includes is known to have ended, by somebody who asked: it races with nothing from now on.
  void settle(Range range, const Clock& clock);

  // Races found since the last call.
  std::vector<Race> take();

 private:
  // What happened to a stretch of memory: the last write, and the reads after it (one for each stream).
  struct Segment {
    uintptr_t end;
    ActorPtr write;
    std::vector<ActorPtr> reads;
  };
  using Segments = std::map<uintptr_t, Segment>;  // by their begin; they do not overlap

  void read(const ActorPtr& actor, const Clock& clock, Range range);
  void write(const ActorPtr& actor, const Clock& clock, Range range);
  void fill_gaps(Range range);
  Segments::iterator cut(uintptr_t address);
  void check(const ActorPtr& before, bool before_writes, const ActorPtr& now, bool now_writes, const Clock& clock,
             uintptr_t address);

  Segments segments_;
  std::vector<Race> races_;
  std::set<std::tuple<std::string, std::string, std::string, std::string>> reported_;
};

}  // namespace late
