// What is wrong with a file of a checkpoint: DATA_LOSS, for people and in the metrics' words.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace ballast {

// Of a status that said why a checkpoint could not be read: checksum, truncated, missing, manifest, version; or other,
// such as an input/output error.
std::string_view DamageOf(const absl::Status& status);

// DATA_LOSS: "PATH is damaged: HOW". damage: one of those words.
absl::Status Damaged(const std::string& path, absl::string_view damage, const std::string& how);
// The status, which then has that DamageOf.
absl::Status WithDamage(absl::Status status, absl::string_view damage);

}  // namespace ballast
