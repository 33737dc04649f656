// Tells threads once to stop. They wait for it by the steady clock, as std::condition_variable does: a wait of Abseil's ends
// at a time of day, and lasts an hour longer where that is set back by one. Thread-safe.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

namespace ballast {

class StopSignal {
 public:
  void Raise() {
    {
      const std::lock_guard lock(mu_);
      raised_ = true;
    }
    is_raised_.notify_all();
  }
  // Waits for it; false: it was not raised within so many seconds.
  bool RaisedWithin(double seconds) {
    std::unique_lock lock(mu_);
    return is_raised_.wait_for(lock, std::chrono::duration<double>(seconds), [this] { return raised_; });
  }

 private:
  std::mutex mu_;
  std::condition_variable is_raised_;
  bool raised_ = false;
};

}  // namespace ballast
