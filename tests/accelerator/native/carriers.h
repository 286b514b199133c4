// Threads that talk to the network, so that nobody else does. No torch headers here.
#pragma once
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

namespace late {

// Why threads of our own: gloo remembers the calling thread's state with every operation, objects of Python among it,
// and drops them on a thread of its own, which takes the interpreter's lock while it holds gloo's. A
// thread that holds the interpreter's lock (DTensor's dispatch does) and calls gloo then waits for ever. Threads that
// know no Python have nothing to drop, and hold no lock.
class Carriers {
 public:
  // On a thread that is idle, or a new one: a task may wait for other ranks, and must not keep others waiting.
  void run(std::function<void()> task) {
    std::unique_lock<std::mutex> lock(mutex_);
    tasks_.push_back(std::move(task));
    if (idle_ < tasks_.size()) std::thread([this] { serve(); }).detach();
    wake_.notify_one();
  }

 private:
  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      ++idle_;
      wake_.wait(lock, [this] { return !tasks_.empty(); });
      --idle_;
      auto task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      task = nullptr;
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> tasks_;
  size_t idle_ = 0;
};

}  // namespace late
