// What a safetensors file has of a version of a run's weights: all of it, or what it has changed of the version before.
// Thread-compatible.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "client/cpp/follow/subscriber.h"

namespace ballast::ctl {

class VersionFile {
 public:
  // All tensors, by their names, in their dtypes. FAILED_PRECONDITION names a tensor that no file can have.
  static absl::StatusOr<VersionFile> Whole(const Subscriber& subscriber, const FollowedVersion& version);
  // Of each tensor that has changed, `NAME.indices`, I64 [n], ascending places in the flattened tensor, and `NAME.values`,
  // its dtype [n]. `base`: the version before. The subscription marks what has changed. FAILED_PRECONDITION names a tensor
  // whose name ends like that.
  static absl::StatusOr<VersionFile> Changes(const Subscriber& subscriber, const FollowedVersion& version,
                                             const FollowedVersion& base);

  uint64_t bytes() const;  // of data
  // The header, then the data. A status of `write` ends it.
  absl::Status Write(const std::function<absl::Status(absl::Span<const std::byte>)>& write) const;

 private:
  struct Tensor {
    std::string name, dtype;
    std::vector<uint64_t> shape;
    uint64_t bytes = 0;
  };
  // What is read at once, of tensors that follow each other.
  struct Part {
    std::vector<Tensor> tensors;
    std::function<absl::Status(absl::Span<std::byte> out)> read;
    uint64_t bytes() const;
  };

  std::map<std::string, std::string> metadata_;
  std::vector<Part> parts_;
};

}  // namespace ballast::ctl
