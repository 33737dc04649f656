// Which kernel a group asks for by the names of its rule, master and state format. What is left empty takes split24 and
// companded8 where the rule has them, else what the rule needs.
//
// Pure functions; thread-safe.
#pragma once

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "kernels/registry.h"

namespace ballast {

// INVALID_ARGUMENT: a name that is not one, with those that are; or formats that the rule is not built for, with those
// that it is. `at` names the group.
absl::StatusOr<const kernels::Kernel*> ChooseKernel(absl::string_view rule, absl::string_view master,
                                                    absl::string_view state, absl::string_view at);

}  // namespace ballast
