#include "memory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

namespace late {
namespace {

constexpr size_t kGrain = 512;  // as CUDA's allocator
constexpr int kScribble = 0xFF;  // NaN, or -1

}  // namespace

void* MemoryPool::allocate(size_t bytes, Stream* home) {
  if (bytes == 0) return nullptr;
  collect();
  Block* block = obtain((bytes + kGrain - 1) / kGrain * kGrain, home);
  block->predecessors = std::exchange(freed_[home], {});
  Usage& usage = usage_[home->device];
  usage.current += static_cast<int64_t>(block->size);
  usage.blocks++;
  usage.peak = std::max(usage.peak, usage.current);
  return block->data;
}

void* MemoryPool::allocate_pinned(size_t bytes) {
  collect();
  return obtain((bytes + kGrain) / kGrain * kGrain, nullptr)->data;
}

Block* MemoryPool::obtain(size_t size, Stream* home) {
  auto& pool = ready_[{home, size}];
  Block* block;
  if (!pool.empty()) {
    block = pool.back();
    pool.pop_back();
  } else {
    block = new Block;
    block->data = static_cast<char*>(std::aligned_alloc(kGrain, size));
    block->size = size;
    block->home = home;
    if (!block->data) throw std::bad_alloc();
    std::memset(block->data, kScribble, size);
    if (home) usage_[home->device].reserved += static_cast<int64_t>(size);
  }
  races_.forget(block->range());  // how it was overwritten has been judged when it was scribbled
  live_[block->data] = block;
  return block;
}

Block* MemoryPool::live(const void* data) const {
  auto it = live_.upper_bound(static_cast<const char*>(data));
  if (it == live_.begin()) return nullptr;
  Block* block = std::prev(it)->second;
  return data < block->data + block->size ? block : nullptr;
}

void MemoryPool::free(void* data) {
  Block* block = live(data);
  if (!block) return;
  live_.erase(block->data);
  if (block->home) {
    usage_[block->home->device].current -= static_cast<int64_t>(block->size);
    usage_[block->home->device].blocks--;
    auto& freed = freed_[block->home];
    freed.insert(freed.end(), block->predecessors.begin(), block->predecessors.end());
    block->predecessors.clear();
  }
  Waiting waiting{block, {}};
  for (Stream* user : block->users) waiting.users.push_back(scheduler_.record(user));
  block->users.clear();
  waiting_.push_back(std::move(waiting));
  collect();
}

void MemoryPool::collect() {
  for (size_t i = 0; i < waiting_.size();) {
    auto& users = waiting_[i].users;
    if (std::all_of(users.begin(), users.end(), [](const MarkPtr& mark) { return mark->done; })) {
      retire(waiting_[i].block, users);
      waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(i));
    } else {
      ++i;
    }
  }
}

void MemoryPool::retire(Block* block, const std::vector<MarkPtr>& users) {
  // The allocator asked for the users' events, so whatever comes next comes after them.
  for (const MarkPtr& mark : users) races_.settle(block->range(), mark->clock);
  if (block->home)
    freed_[block->home].push_back(block);
  else
    ready_[{nullptr, block->size}].push_back(block);
}

void MemoryPool::record_use(const void* data, Stream* stream) {
  Block* block = live(data);
  if (!block || block->home == stream) return;
  if (std::find(block->users.begin(), block->users.end(), stream) == block->users.end()) block->users.push_back(stream);
}

std::vector<Block*> MemoryPool::overwritten_by(const std::vector<Range>& writes) {
  std::vector<Block*> found;
  for (const Range& range : writes) {
    Block* block = live(reinterpret_cast<const void*>(range.begin));
    if (!block) continue;
    found.insert(found.end(), block->predecessors.begin(), block->predecessors.end());
    block->predecessors.clear();
  }
  return found;
}

void MemoryPool::scribble(Block* block) {
  std::memset(block->data, kScribble, block->size);
  ready_[{block->home, block->size}].push_back(block);
}

int MemoryPool::device_of(const void* data) const {
  Block* block = live(data);
  return block && block->home ? block->home->device : -1;
}

bool MemoryPool::is_pinned(const void* data) const {
  Block* block = live(data);
  return block && !block->home;
}

}  // namespace late
