// A call that other threads may cancel: for as long as it lives, its context is in a slot that they see under a lock.
//
//   ScopedCall call(&mu_, &call_, [this] { return closed_; });   // closed_ before: cancelled at once
//   stub.Subscribe(&call.context, request);
//   ...
//   absl::MutexLock lock(&mu_);                                  // on another thread
//   if (call_ != nullptr) call_->TryCancel();
#pragma once

#include <grpcpp/grpcpp.h>

#include "absl/functional/function_ref.h"
#include "absl/synchronization/mutex.h"

namespace ballast {

class ScopedCall {
 public:
  // `mu` guards the slot; `cancelled` is asked under it, once.
  ScopedCall(absl::Mutex* mu, grpc::ClientContext** slot, absl::FunctionRef<bool()> cancelled) : mu_(mu), slot_(slot) {
    absl::MutexLock lock(mu_);
    *slot_ = &context;
    if (cancelled()) context.TryCancel();
  }
  ScopedCall(const ScopedCall&) = delete;
  ScopedCall& operator=(const ScopedCall&) = delete;
  ~ScopedCall() {
    absl::MutexLock lock(mu_);
    *slot_ = nullptr;
  }

  grpc::ClientContext context;

 private:
  absl::Mutex* const mu_;
  grpc::ClientContext** const slot_;
};

}  // namespace ballast
