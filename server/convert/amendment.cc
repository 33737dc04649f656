#include "server/convert/amendment.h"

#include <algorithm>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

#include "kernels/registry.h"
#include "server/base/status_macros.h"
#include "server/convert/canonical_spec.h"

namespace ballast {
namespace {

const v1::GroupSpec& GroupOf(const v1::RunSpec& spec, int tensor) {
  return spec.groups(static_cast<int>(spec.tensors(tensor).group()));
}

bool SamePlanes(const v1::GroupSpec& a, const v1::GroupSpec& b) {
  const kernels::Kernel* const x = kernels::FindKernel(a.rule(), a.master(), a.state());
  const kernels::Kernel* const y = kernels::FindKernel(b.rule(), b.master(), b.state());
  return std::equal(x->planes.begin(), x->planes.end(), y->planes.begin(), y->planes.end(),
                    [](const kernels::Plane& p, const kernels::Plane& q) {
                      return p.kind == q.kind && p.bytes == q.bytes && p.per == q.per;
                    });
}

// What the tensor's stored bits mean must stay.
absl::Status CheckStored(const std::string& tensor, const v1::GroupSpec& is, const v1::GroupSpec& asked) {
  const auto refuse = [&](absl::string_view what, const std::string& from, const std::string& to,
                          absl::string_view why) {
    return absl::InvalidArgumentError(absl::StrCat("AmendRun: the ", what, " of tensor '", tensor, "' is ", from,
                                                   ", asked for is ", to, ": ", why,
                                                   "; leave it, or load the run's state into a run of another name"));
  };
  if (is.master() != asked.master()) {
    return refuse("master format", is.master(), asked.master(), "what is stored keeps its bits");
  }
  if (is.state() != asked.state()) {
    return refuse("state format", is.state(), asked.state(), "what is stored keeps its bits");
  }
  if (is.rule() == asked.rule() || SamePlanes(is, asked)) return absl::OkStatus();
  return refuse("rule", is.rule(), asked.rule(), "the two do not keep the same state");
}

// The tensor as it must stay: its group, and what that says of formats, is compared by CheckStored.
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
  return fixed;
}

}  // namespace

absl::Status CheckAmendment(const v1::RunSpec& existing, const v1::RunSpec& asked) {
  if (const auto difference = FirstDifference(Fixed(existing), Fixed(asked))) {
    return absl::InvalidArgumentError(
        absl::StrCat("AmendRun: ", *difference,
                     ", which is for the whole life of a run; tensors, groups, hyperparameters, accumulation and "
                     "max_grad_norm may change. Ask for it in a run of another name"));
  }
  return CheckTensors(existing, asked);
}

}  // namespace ballast
