// NCCL, which moves bytes between the GPUs of processes, on one host or several: its library, found at run time, of version
// 2.27.3 or later. Nothing of it is linked, and its header is not needed: what is used of its interface is the same since 2.14.
//
// Thread-safe. A status names the function of NCCL's that failed, with NCCL's text: UNAVAILABLE where the other end or the
// network has failed, else INTERNAL.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ballast {

class Nccl {
 public:
  // Of the process's NCCL, once one is loaded, as torch does; else of the first that the system finds (LD_LIBRARY_PATH).
  // NOT_FOUND: there is none; FAILED_PRECONDITION: it is too old, or told to block. Both say what to do. `library`: another one,
  // for tests.
  static absl::StatusOr<std::shared_ptr<const Nccl>> Load(const char* library = "libnccl.so.2");

  // Both ends must have the same: 22703 is 2.27.3.
  int version() const { return version_; }
  // For two processes to find one another by: ncclUniqueId. Who makes it listens on a port of NCCL's choice until both have
  // come, or the process ends.
  absl::StatusOr<std::string> MakeId() const;
  static constexpr uint64_t kIdBytes = 128;

 private:
  friend class NcclLink;
  struct Functions;
  Nccl(std::shared_ptr<const Functions> functions, int version) : functions_(std::move(functions)), version_(version) {}

  const std::shared_ptr<const Functions> functions_;
  const int version_;
};

// "2.27.3", for people.
std::string NcclVersionText(int version);

}  // namespace ballast
