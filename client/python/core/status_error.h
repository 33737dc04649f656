// absl::Status as a Python exception of ballast.errors.
#pragma once

#include <nanobind/nanobind.h>

#include <exception>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ballast {

// Thrown inside the binding only; becomes the Python exception that ballast.errors.from_status chooses.
class StatusError : public std::exception {
 public:
  explicit StatusError(absl::Status status) : status_(std::move(status)) {}
  const char* what() const noexcept override { return "ballast::StatusError"; }
  const absl::Status& status() const { return status_; }

 private:
  absl::Status status_;
};

inline void OrThrow(absl::Status status) {
  if (!status.ok()) throw StatusError(std::move(status));
}

template <typename T>
T OrThrow(absl::StatusOr<T> value) {
  if (!value.ok()) throw StatusError(value.status());
  return *std::move(value);
}

void RegisterStatusError();

}  // namespace ballast
