// Device and pinned memory: a caching allocator with the rules of CUDA's, that shows who breaks them.
//
// A caching allocator may give freed memory to the next allocation on the same stream, and the first write into that
// allocation destroys what was there. Here every freed block is treated as if that had happened: the first job that
// writes into the next allocation on the block's home stream is preceded by one that scribbles over the block. So the
// old contents die at the earliest moment that a real allocator permits, whatever the sizes, and not earlier.
//
// Only scribbled blocks are handed out again, and nothing goes back to the system: a stale pointer reads NaN.
// No torch headers here, no lock (see runtime.h).
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "races.h"
#include "scheduler.h"

namespace late {

struct Block {
  char* data = nullptr;
  size_t size = 0;
  Stream* home = nullptr;            // pinned memory has none
  std::vector<Stream*> users;        // other streams that were told to the allocator (record_stream)
  std::vector<Block*> predecessors;  // freed blocks that this one may have been made of, not yet scribbled
  Range range() const { return {reinterpret_cast<uintptr_t>(data), reinterpret_cast<uintptr_t>(data) + size}; }
};

struct Usage {
  int64_t current = 0, peak = 0, blocks = 0, reserved = 0;  // bytes, but for the number of blocks
};

class MemoryPool {
 public:
  MemoryPool(Scheduler& scheduler, RaceDetector& races) : scheduler_(scheduler), races_(races) {}

  void* allocate(size_t bytes, Stream* home);
  void* allocate_pinned(size_t bytes);
  void free(void* data);
  void record_use(const void* data, Stream* stream);

  // What has to be scribbled before a job that writes there.
  std::vector<Block*> overwritten_by(const std::vector<Range>& writes);
  void scribble(Block* block);

  // Blocks whose last users have ended become free.
  void collect();

  int device_of(const void* data) const;  // -1: not device memory
  bool is_pinned(const void* data) const;
  Usage& usage(int device) { return usage_[device]; }

 private:
  struct Waiting {
    Block* block;
    std::vector<MarkPtr> users;
  };
  Block* live(const void* data) const;
  Block* obtain(size_t size, Stream* home);
  void retire(Block* block, const std::vector<MarkPtr>& users);

  Scheduler& scheduler_;
  RaceDetector& races_;
  std::map<const char*, Block*> live_;
  std::map<std::pair<Stream*, size_t>, std::vector<Block*>> ready_;  // scribbled
  std::map<Stream*, std::vector<Block*>> freed_;                     // by their home stream
  std::vector<Waiting> waiting_;                                     // freed, but other streams use them
  std::map<int, Usage> usage_;
};

}  // namespace late
