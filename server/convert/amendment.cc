#include "server/convert/amendment.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

#include "kernels/registry.h"
#include "server/base/status_macros.h"
#include "server/convert/canonical_spec.h"
#include "server/spec/carry_over.h"

namespace ballast {
namespace {

const v1::GroupSpec& GroupOf(const v1::RunSpec& spec, int tensor) {
  return spec.groups(static_cast<int>(spec.tensors(tensor).group()));
}

// Rules whose moments are of one kind, so that one may go on with the other's; moments of any other rule are its own:
// stable_adamw's are debiased, lion's an average where sgd's is a sum.
constexpr std::pair<absl::string_view, absl::string_view> kMoments[] = {
    {"adam", "adam"},         {"adamw", "adam"}, {"collage_light", "adam"},
    {"collage_plus", "adam"}, {"sgd", "sgd"},    {"sgdw", "sgd"},
};

absl::string_view MomentsOf(absl::string_view rule) {
  const auto* const found =
      std::find_if(std::begin(kMoments), std::end(kMoments), [rule](const auto& of) { return of.first == rule; });
  return found == std::end(kMoments) ? rule : found->second;
}

// What is stored of the tensor must be able to go on.
absl::Status CheckStored(const std::string& tensor, const v1::GroupSpec& is, const v1::GroupSpec& asked) {
  const kernels::Kernel& from = *kernels::FindKernel(is.rule(), is.master(), is.state());
  const kernels::Kernel& to = *kernels::FindKernel(asked.rule(), asked.master(), asked.state());
  const bool same_moments = MomentsOf(is.rule()) == MomentsOf(asked.rule());
  for (const auto kind : {kernels::PlaneKind::kMomentum, kernels::PlaneKind::kVariance}) {
    if (same_moments && CarryOverOf(from, to, kind) != CarryOver::kImpossible) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "AmendRun: the rule of tensor '", tensor, "' is ", is.rule(), " with state ", is.state(), ", asked for is ",
        asked.rule(), " with ", asked.state(),
        ": what one keeps of a tensor cannot become the other's; leave it, or train on in a run of another name"));
  }
  return absl::OkStatus();
}

// The tensor as it must stay: what its group says of its storage is compared by CheckStored.
v1::TensorSpec Lasting(const v1::TensorSpec& tensor) {
  v1::TensorSpec lasting = tensor;
  lasting.clear_group();
  lasting.clear_lr_scale();
  lasting.clear_wd_scale();
  return lasting;
}

absl::Status CheckTensors(const v1::RunSpec& existing, const v1::RunSpec& asked) {
  absl::flat_hash_map<absl::string_view, int> places;
  for (int i = 0; i < asked.tensors_size(); ++i) places[asked.tensors(i).name()] = i;
  for (int i = 0; i < existing.tensors_size(); ++i) {
    const std::string& name = existing.tensors(i).name();
    const auto place = places.find(name);
    if (place == places.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("AmendRun: tensor '", name,
                       "' is left out, and a run keeps its tensors: name it, and freeze it instead "
                       "(list it as absent in each micro-batch: it is then left as it is)"));
    }
    if (place->second != i) {
      return absl::InvalidArgumentError(
          absl::StrCat("AmendRun: tensor '", name, "' is number ", i, " of the run and ", place->second,
                       " of the spec: a run's tensors come first, in their order, and new ones follow"));
    }
    if (existing.has_part() && existing.part().tensors(i) != asked.part().tensors(i)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "AmendRun: tensor '", name, "' is number ", existing.part().tensors(i), " of the run on several daemons and ",
          asked.part().tensors(i), " of the spec: a run's tensors keep their numbers and their daemons"));
    }
    v1::RunSpec is, wanted;
    *is.add_tensors() = Lasting(existing.tensors(i));
    *wanted.add_tensors() = Lasting(asked.tensors(i));
    if (const auto difference = FirstDifference(is, wanted)) {
      return absl::InvalidArgumentError(absl::StrCat("AmendRun: tensor '", name, "': ", *difference,
                                                     ", which cannot change; add a tensor of another name"));
    }
    RETURN_IF_ERROR(CheckStored(name, GroupOf(existing, i), GroupOf(asked, i)));
  }
  return absl::OkStatus();
}

// All that must be the same but tensors.
v1::RunSpec Fixed(const v1::RunSpec& spec) {
  v1::RunSpec fixed = spec;
  fixed.clear_tensors();
  fixed.clear_groups();
  fixed.clear_accumulation();
  fixed.clear_max_grad_norm();
  fixed.clear_checkpoint();
  fixed.clear_follow();
  if (fixed.has_part()) {
    fixed.mutable_part()->clear_tensors();
    fixed.mutable_part()->clear_whole_tensors();
  }
  return fixed;
}

}  // namespace

absl::Status CheckAmendment(const v1::RunSpec& existing, const v1::RunSpec& asked) {
  if (const auto difference = FirstDifference(Fixed(existing), Fixed(asked))) {
    return absl::InvalidArgumentError(
        absl::StrCat("AmendRun: ", *difference,
                     ", which is for the whole life of a run; tensors, groups, hyperparameters, accumulation, "
                     "max_grad_norm, checkpoint and follow may change. Ask for it in a run of another name"));
  }
  return CheckTensors(existing, asked);
}

}  // namespace ballast
