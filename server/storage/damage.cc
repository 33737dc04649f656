#include "server/storage/damage.h"

#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"

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

}  // namespace ballast
