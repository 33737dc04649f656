// A future that has its answer already: of a call that is refused at once.
#pragma once

#include <future>
#include <type_traits>
#include <utility>

#include "absl/status/statusor.h"

#include "client/cpp/client.h"

namespace ballast {

template <typename Value = StepResult>
std::future<absl::StatusOr<Value>> Ready(std::type_identity_t<absl::StatusOr<Value>> answer) {
  std::promise<absl::StatusOr<Value>> promise;
  promise.set_value(std::move(answer));
  return promise.get_future();
}

}  // namespace ballast
