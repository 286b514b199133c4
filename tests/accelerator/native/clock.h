// Vector clocks: what is certain to have happened before a piece of work, whatever the order of execution.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace late {

// The count-th job of a stream. Streams are numbered from 0, over all devices.
struct Moment {
  size_t stream = 0;
  uint64_t count = 0;
};

class Clock {
 public:
  // The stream's next job.
  Moment tick(size_t stream) {
    if (counts_.size() <= stream) counts_.resize(stream + 1);
    return {stream, ++counts_[stream]};
  }

  // Whatever the other knows is known here, too.
  void join(const Clock& other) {
    if (counts_.size() < other.counts_.size()) counts_.resize(other.counts_.size());
    for (size_t i = 0; i < other.counts_.size(); ++i) counts_[i] = std::max(counts_[i], other.counts_[i]);
  }

  bool includes(Moment moment) const {
    return moment.stream < counts_.size() && counts_[moment.stream] >= moment.count;
  }

 private:
  std::vector<uint64_t> counts_;
};

}  // namespace late
