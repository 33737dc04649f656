// Waiting for the network from Python: the interpreter's lock is free meanwhile, and Ctrl-C ends the wait.
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "client/python/core/interpreter_lock.h"
#include "client/python/core/status_error.h"

namespace ballast {

template <typename Call>
auto Unlocked(Call call) {
  const LockFreed unlocked;
  return call();
}

// A call that InterruptibleCalls makes: its thread sets kEnded, its caller kLeft, and who is second undoes it.
enum class CallState { kRuns, kEnded, kLeft };

// Of a thread of this module's own: whether nobody waits any more for what it does.
inline thread_local std::function<bool()> thread_is_left;
// True in a thread that waits in Heeding. Others may outlive the interpreter, and do not ask it.
inline thread_local bool heeds_signals = false;

// Whether nobody waits any more for what this thread does: a signal's handler raised, as Ctrl-C's does.
inline bool SignalRaised() {
  if (thread_is_left) return thread_is_left();
  if (!heeds_signals) return false;
  const LockTaken locked;
  return PyErr_CheckSignals() != 0;
}

// Unlocked, for calls that wait: Ctrl-C ends the wait. PyErr_Occurred() is then what was raised.
template <typename Call>
auto Heeding(Call call) {
  heeds_signals = true;
  auto result = Unlocked(std::move(call));
  heeds_signals = false;
  return result;
}

// Heeding, where what was raised is thrown.
template <typename Call>
auto UnlockedTransfer(Call call) {
  auto result = Heeding(std::move(call));
  if (PyErr_Occurred() != nullptr) throw nanobind::python_error();
  return OrThrow(std::move(result));
}

// Calls that return absl::StatusOr, each on a thread of its own, for which the caller waits. On a signal whose handler
// raises, the call is left to end by itself, which SignalRaised tells it to do: it must own all that it touches. The
// next call begins when it has ended. Used with the interpreter's lock.
class InterruptibleCalls {
 public:
  // `undo`: takes back what the call has done, if it succeeded when nobody waited for it any more.
  template <typename Call, typename Undo>
  auto Make(Call call, Undo undo) {
    using Result = decltype(call());
    auto state = std::make_shared<std::atomic<CallState>>(CallState::kRuns);
    std::packaged_task<Result()> task(
        [call = std::optional(std::move(call)), undo = std::optional(undo), state, left = left_]() mutable -> Result {
          if (left) (*left)();
          thread_is_left = [state] { return *state == CallState::kLeft; };
          const bool raised = SignalRaised();
          Result result = raised ? Result(absl::CancelledError("interrupted before it began")) : (*call)();
          if (!raised && state->exchange(CallState::kEnded) == CallState::kLeft && result.ok()) (*undo)();
          call.reset();  // what they own is the caller's to end from now on, and nothing of it is left when it may fork
          undo.reset();
          return result;
        });
    auto result = std::make_shared<std::future<Result>>(task.get_future());
    std::thread(std::move(task)).detach();
    for (;;) {
      const bool ready = Unlocked([&] { return result->wait_for(kGlance) == std::future_status::ready; });
      if (PyErr_CheckSignals() != 0) break;
      if (ready) return result->get();
    }
    nanobind::python_error raised;
    if (state->exchange(CallState::kLeft) == CallState::kEnded) {
      Unlocked([&] {
        if (result->get().ok()) undo();
      });
    } else {
      left_ = std::make_shared<const std::function<void()>>([result] { result->wait(); });
    }
    throw raised;
  }

  // For calls that are not made here.
  void AwaitLeft() {
    const auto left = left_;
    if (!left) return;
    OrThrow(Make([]() -> absl::StatusOr<bool> { return true; }, [] {}));
    if (left_ == left) left_ = nullptr;
  }

  // Lets go of what a call that was left behind owns.
  void Forget() { left_ = nullptr; }

 private:
  static constexpr std::chrono::milliseconds kGlance{100};

  std::shared_ptr<const std::function<void()>> left_;  // returns when the last call that was left behind has ended
};

}  // namespace ballast
