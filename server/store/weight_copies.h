// Copies of one tensor, its weights and state, as they were at some time, in host memory, for a reader that is slower
// than the tensor is updated. One copy exists at a time, in the order asked for. It is made behind the updates already
// submitted and ahead of the next one, so no update waits for the reader.
//
// Strand-confined. Memory: one tensor, while somebody has the copy.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"

#include "server/store/parameter_store.h"

namespace ballast {

class WeightCopies {
 public:
  // Gets the copy, which is the asker's until GiveBack; later tasks find it made. RESOURCE_EXHAUSTED when the device
  // has no room for it.
  using Done = absl::AnyInvocable<void(absl::StatusOr<const StoreImage*>)>;
  explicit WeightCopies(ParameterStore* store) : store_(store) {}

  void Ask(const void* asker, uint32_t tensor, Done done);
  // The asker no longer wants a copy; its `done` is not called.
  void Withdraw(const void* asker);
  // Called by the asker that has the copy, or got an error instead, once none of its tasks uses the copy any more.
  void GiveBack();
  bool awaited() const { return !askers_.empty(); }

 private:
  struct Asker {
    const void* id = nullptr;
    uint32_t tensor = 0;
    Done done;
  };
  void MakeNext();
  void OnSaved();
  void Free();

  ParameterStore* const store_;
  bool taken_ = false;
  bool saving_ = false;    // the copy is being made
  bool returned_ = false;  // though that goes on
  std::optional<StoreImage> copy_;
  std::deque<Asker> askers_;
};

}  // namespace ballast
