// Waiting for the network from Python: the interpreter's lock is free meanwhile, and Ctrl-C ends the wait.
#pragma once

#include <nanobind/nanobind.h>

#include <chrono>
#include <future>
#include <memory>
#include <thread>
#include <utility>

namespace ballast {

// Runs `call` on a thread of its own and waits. On a signal whose handler raises, the call is left to end by itself: it
// must own all that it touches.
template <typename Call>
auto Interruptible(Call call) {
  using Result = decltype(call());
  auto task = std::make_shared<std::packaged_task<Result()>>(std::move(call));
  std::future<Result> result = task->get_future();
  std::thread([task = std::move(task)]() mutable {
    (*task)();
    task.reset();
  }).detach();
  for (;;) {
    bool ready = false;
    {
      nanobind::gil_scoped_release unlocked;
      ready = result.wait_for(std::chrono::milliseconds(100)) == std::future_status::ready;
    }
    if (ready) return result.get();
    if (PyErr_CheckSignals() != 0) throw nanobind::python_error();
  }
}

}  // namespace ballast
