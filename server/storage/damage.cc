#include "server/storage/damage.h"

#include <google/protobuf/descriptor.h>

#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "proto/checkpoint/manifest.h"
#include "proto/known_fields.h"

namespace ballast {
namespace {

// Where a status has its word.
constexpr absl::string_view kDamageUrl = "ballast/damage";

}  // namespace

std::string_view DamageOf(const absl::Status& status) {
  for (const char* damage : {"checksum", "truncated", "missing", "manifest", "version"}) {
    if (status.GetPayload(kDamageUrl) == absl::Cord(damage)) return damage;
  }
  return "other";
}

absl::Status WithDamage(absl::Status status, absl::string_view damage) {
  status.SetPayload(kDamageUrl, absl::Cord(damage));
  return status;
}

absl::Status Damaged(const std::string& path, absl::string_view damage, const std::string& how) {
  return WithDamage(absl::DataLossError(absl::StrCat(path, " is damaged: ", how)), damage);
}

absl::Status OfLaterVersion(const std::string& file, absl::string_view why) {
  return WithDamage(absl::FailedPreconditionError(absl::StrCat(file, " ", why)), "version");
}

absl::Status ReadJson(absl::string_view json, const std::string& file, google::protobuf::Message* message) {
  absl::Status read = FromJson(json, file, message);
  return absl::IsFailedPrecondition(read) ? WithDamage(std::move(read), "version") : read;
}

absl::Status CheckVersion(const google::protobuf::Message& message, const std::string& file) {
  const auto unknown = UnknownFieldOf(message);
  if (!unknown) return absl::OkStatus();
  return OfLaterVersion(file,
                        absl::StrCat("has the field ", *unknown, " of ", std::string(message.GetDescriptor()->name()),
                                     ", which this daemon does not know: start the version that wrote it"));
}

}  // namespace ballast
