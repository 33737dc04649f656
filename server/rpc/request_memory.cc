#include "server/rpc/request_memory.h"

#include <string>

#include "absl/strings/str_cat.h"

#include "server/base/saturating.h"

namespace ballast {

absl::StatusOr<uint64_t> MemoryOf(const google::protobuf::Message& request, uint64_t most) {
  const uint64_t bytes = request.SpaceUsedLong();
  if (bytes <= most) return bytes;
  return absl::ResourceExhaustedError(
      absl::StrCat("the ", std::string(request.GetDescriptor()->name()), " takes ", bytes,
                   " bytes of the daemon's memory; wanted: at most ", most,
                   "; leave out what is empty or repeated, and what this daemon does not know"));
}

absl::Status CheckRequestMemory(const google::protobuf::Message& request, uint64_t tensors, uint64_t chunks) {
  constexpr uint64_t kOfCall = 64 << 10, kOfTensor = 1 << 10, kOfChunk = 128;  // two ranges of elements
  return MemoryOf(request, Sum(kOfCall, Sum(Product(tensors, kOfTensor), Product(chunks, kOfChunk)))).status();
}

}  // namespace ballast
