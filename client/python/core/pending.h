// What a call of the client's promised, until it is in. Used with the interpreter's lock, which is free while it waits.
#pragma once

#include <nanobind/nanobind.h>

#include <chrono>
#include <future>
#include <optional>
#include <utility>

#include "absl/status/statusor.h"

#include "client/python/core/interpreter_lock.h"
#include "client/python/core/status_error.h"

namespace ballast {

template <typename T>
class Pending {
 public:
  explicit Pending(std::future<absl::StatusOr<T>> promised) : promised_(std::move(promised)) {}

  // The same at every call; nullptr when it is not in after `timeout_s`. Throws the error that came in its place.
  const T* Wait(double timeout_s) {
    if (!arrived_) {
      const LockFreed unlocked;
      if (promised_.wait_for(std::chrono::duration<double>(timeout_s)) == std::future_status::ready) {
        arrived_ = promised_.get();
      }
    }
    if (!arrived_) return nullptr;
    OrThrow(arrived_->status());
    return &**arrived_;
  }

 private:
  std::future<absl::StatusOr<T>> promised_;
  std::optional<absl::StatusOr<T>> arrived_;
};

}  // namespace ballast
