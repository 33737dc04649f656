#include "proto/nccl/nccl.h"

#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/nccl/nccl_functions.h"

namespace ballast {
namespace {

// Before it NCCL kept what a communicator has under way with the thread that called, for one at a time and as long as it lives.
constexpr int kOldest = 22703;

}  // namespace

absl::StatusOr<std::shared_ptr<const Nccl>> Nccl::Load(const char* library) {
  void* const opened = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (opened == nullptr) {
    return absl::NotFoundError(
        absl::StrCat("there is no NCCL, ", dlerror(),
                     ": install it, as pip install nvidia-nccl-cu12 or nvidia-nccl-cu13 does, and "
                     "name its folder in LD_LIBRARY_PATH"));
  }
  const auto functions = std::make_shared<const Functions>(opened);
  if (functions->get_version.call == nullptr) {
    return absl::NotFoundError(absl::StrCat(library, " is no NCCL: it has no ", functions->get_version.name));
  }
  int version = 0;
  if (auto s = functions->Check(functions->get_version.call(&version), functions->get_version.name); !s.ok()) return s;
  if (version < kOldest || functions->lacks != nullptr) {
    const char* const lacks = functions->lacks == nullptr ? "" : functions->lacks;
    return absl::FailedPreconditionError(absl::StrCat("NCCL ", NcclVersionText(version), " is too old",
                                                      *lacks ? ", it has no " : "", lacks, ": use 2.27.3 or later"));
  }
  if (const char* const blocking = std::getenv("NCCL_COMM_BLOCKING");
      blocking != nullptr && absl::string_view(blocking) != "0") {
    return absl::FailedPreconditionError(
        "NCCL_COMM_BLOCKING makes calls to NCCL wait for the other end, however long that takes: unset it, or set it "
        "to 0");
  }
  return std::shared_ptr<const Nccl>(new Nccl(functions, version));
}

absl::StatusOr<std::string> Nccl::MakeId() const {
  Functions::Id id;
  if (auto s = functions_->Check(functions_->get_id.call(&id), functions_->get_id.name); !s.ok()) return s;
  return std::string(id.bytes.data(), id.bytes.size());
}

absl::Status Nccl::Functions::Check(int result, const char* name, Communicator communicator) const {
  if (result == kSuccess || result == kInProgress) return absl::OkStatus();
  const char* const text = error_text.call == nullptr ? nullptr : error_text.call(result);
  const char* const last = last_error.call == nullptr ? nullptr : last_error.call(communicator);
  const bool away = result == kRemoteError || result == kSystemError || result == kTimeout;
  const std::string detail = last == nullptr || *last == '\0' ? "" : absl::StrCat("; ", last);
  return {away ? absl::StatusCode::kUnavailable : absl::StatusCode::kInternal,
          absl::StrCat(name, ": ", text == nullptr ? "unknown" : text, " (error ", result, ")", detail)};
}

std::string NcclVersionText(int version) {
  if (version < 10000) return absl::StrCat(version / 1000, ".", version / 100 % 10, ".", version % 100);  // to 2.8
  return absl::StrCat(version / 10000, ".", version / 100 % 100, ".", version % 100);
}

}  // namespace ballast
