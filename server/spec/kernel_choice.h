// Which kernel a group asks for by the names of its rule, master and state format. An empty name stands for split24 and
// companded8 if the rule is built for them, otherwise for what the rule needs.
//
// Pure functions; thread-safe.
#pragma once

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "kernels/registry.h"

namespace ballast {

// INVALID_ARGUMENT: a name is unknown, and the message lists the known ones; or the rule is not built for these
// formats, and the message lists those that it is built for. `at` names the group.
absl::StatusOr<const kernels::Kernel*> ChooseKernel(absl::string_view rule, absl::string_view master,
                                                    absl::string_view state, absl::string_view at);

}  // namespace ballast
