// What the caller reads of a version.
#include "absl/strings/str_cat.h"

#include "client/cpp/follow/daemon_subscriber.h"

namespace ballast {

absl::Status DaemonSubscriber::CheckReading(uint32_t tensor) const {
  if (!readable()) {
    return absl::FailedPreconditionError(
        absl::StrCat("no version of run '", subscription_.run_id,
                     "' is here: none has come yet, or one comes whole just now; wait in Next until it returns one"));
  }
  return weights_.tensors().CheckIndex(tensor);
}

absl::StatusOr<FollowedTensor> DaemonSubscriber::Served(uint32_t tensor) const {
  if (auto s = CheckReading(tensor); !s.ok()) return s;
  return FollowedTensor{
      .format = weights_.tensors()[tensor].serving, .codes = weights_.codes(tensor), .scales = weights_.scales(tensor)};
}

absl::Status DaemonSubscriber::Read(uint32_t tensor, absl::Span<std::byte> out) const {
  if (auto s = CheckReading(tensor); !s.ok()) return s;
  if (out.size() != weights_.read_bytes(tensor)) {
    return absl::InvalidArgumentError(absl::StrCat("reading ", weights_.tensors().Name(tensor), ": got room for ",
                                                   out.size(), " bytes, wanted ", weights_.read_bytes(tensor), " (",
                                                   weights_.tensors()[tensor].dtype, ")"));
  }
  return weights_.Read(tensor, out.data());
}

absl::StatusOr<uint64_t> DaemonSubscriber::CountChanged(uint32_t tensor) const {
  if (auto s = CheckReading(tensor); !s.ok()) return s;
  if (!changed_) {
    return absl::FailedPreconditionError(
        absl::StrCat("the subscription to run '", subscription_.run_id,
                     "' does not mark which elements have changed: open it with marks_changed"));
  }
  return changed_->Count(tensor);
}

absl::Status DaemonSubscriber::ReadChanged(uint32_t tensor, absl::Span<int64_t> places,
                                           absl::Span<std::byte> values) const {
  const auto count = CountChanged(tensor);
  if (!count.ok()) return count.status();
  const uint64_t bytes = *count * FormatBytes(weights_.tensors()[tensor].dtype);
  if (places.size() != *count || values.size() != bytes) {
    return absl::InvalidArgumentError(absl::StrCat("reading what has changed of ", weights_.tensors().Name(tensor),
                                                   ": got room for ", places.size(), " places and ", values.size(),
                                                   " bytes of values, wanted ", *count, " and ", bytes));
  }
  changed_->Places(tensor, places.data());
  return weights_.Read(tensor, places, values.data());
}

}  // namespace ballast
