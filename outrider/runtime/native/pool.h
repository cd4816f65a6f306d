// Threads that share the pieces of a phase.
//
// Each thread has a share of the pieces, one stretch, which it takes piece by piece; whoever is done takes from the others'. So weights are
// read front to back, and a thread that the system stops holds up no more than the piece it has. Nobody waits for a thread that has not
// begun: the caller goes on when all pieces are taken and those inside have left. What a piece computes never depends on who does.
// Whoever waits looks for some microseconds, then sleeps, so that a thread that was stopped may run where the other waited.

#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "lanes.h"

class Pool {
 public:
  explicit Pool(int64_t threads) : size_(threads), shares_(new Share[threads]) {
    for (int64_t t = 1; t < threads; ++t) workers_.emplace_back([this, t] { work(t); });
  }
  ~Pool() {
    is_ending_ = true;
    call();
    for (auto& worker : workers_) worker.join();
  }
  int64_t size() const { return size_; }
  std::mutex& turn() { return turn_; }  // one pass at a time

  // body(piece) for pieces 0 .. count
  template <typename Body>
  void run(int64_t count, const Body& body) {
    if (count == 1 || size_ == 1) {
      for (int64_t piece = 0; piece < count; ++piece) body(piece);
      return;
    }
    for (int64_t t = 0; t < size_; ++t) {
      shares_[t].next.store(count * t / size_, std::memory_order_relaxed);
      shares_[t].end = count * (t + 1) / size_;
    }
    task_ = [](const void* body, int64_t piece) { (*static_cast<const Body*>(body))(piece); };
    context_ = &body;
    inside_.store(0);  // open
    call();
    take(0);
    Patience patience;
    for (int32_t none = 0; !inside_.compare_exchange_weak(none, CLOSED); none = 0) {
      if (none == 0 || patience.has_some()) continue;
      is_waiting_ = true;
      inside_.wait(none);
      is_waiting_ = false;
    }
  }

 private:
  struct alignas(128) Share {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };
  static constexpr int32_t CLOSED = -1;

  // How long to look before going to sleep: phases follow one another faster, passes do not.
  class Patience {
   public:
    bool has_some() {
      for (int i = 0; i < 8; ++i) relax();
      return std::chrono::steady_clock::now() < end_;
    }

   private:
    const std::chrono::steady_clock::time_point end_ = std::chrono::steady_clock::now() + std::chrono::microseconds(20);
  };

  void call() {
    epoch_.fetch_add(1);
    if (sleepers_.load()) epoch_.notify_all();
  }

  bool enter() {
    int32_t inside = inside_.load();
    while (inside != CLOSED)
      if (inside_.compare_exchange_weak(inside, inside + 1)) return true;
    return false;
  }

  void take(int64_t thread) {
    for (int64_t other = 0; other < size_; ++other) {
      Share& share = shares_[(thread + other) % size_];
      for (int64_t piece; (piece = share.next.fetch_add(1, std::memory_order_relaxed)) < share.end;) task_(context_, piece);
    }
  }

  void work(int64_t thread) {
    for (uint32_t seen = 0;;) {
      uint32_t now = epoch_.load();
      for (Patience patience; now == seen && patience.has_some();) now = epoch_.load();
      if (now == seen) {
        ++sleepers_;
        epoch_.wait(seen);
        --sleepers_;
        continue;
      }
      seen = now;
      if (is_ending_) return;
      if (!enter()) continue;
      take(thread);
      if (inside_.fetch_sub(1) == 1 && is_waiting_) inside_.notify_one();
    }
  }

  int64_t size_;
  std::unique_ptr<Share[]> shares_;
  void (*task_)(const void*, int64_t) = nullptr;
  const void* context_ = nullptr;
  std::atomic<int32_t> inside_{CLOSED};
  std::atomic<uint32_t> epoch_{0};
  std::atomic<int32_t> sleepers_{0};
  std::atomic<bool> is_ending_{false}, is_waiting_{false};
  std::vector<std::thread> workers_;
  std::mutex turn_;
};
