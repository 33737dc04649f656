#include "server/relay/relayed_spec.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

#include "server/base/saturating.h"
#include "server/convert/convert.h"

namespace ballast {
namespace {

// 4 bytes of each fit a message that clients take.
constexpr uint64_t kMostChunkElements = uint64_t{1} << 20;

// What versions depend on. How the run is trained is not this daemon's business, nor need it know the words for it.
v1::RunSpec WhatIsServed(const v1::RunSpec& spec) {
  v1::RunSpec served;
  served.set_run_id(spec.run_id());
  served.mutable_follow()->set_every(spec.follow().every());  // of the weights: averages and names are the upstream's
  served.mutable_follow()->set_readers(spec.follow().readers());
  for (const v1::TensorSpec& tensor : spec.tensors()) {
    v1::TensorSpec* const made = served.add_tensors();
    made->set_name(tensor.name());
    *made->mutable_shape() = tensor.shape();
    made->set_dtype(tensor.dtype());
    made->set_group(tensor.group());
  }
  for (const v1::GroupSpec& group : spec.groups()) {
    v1::GroupSpec* const made = served.add_groups();
    made->set_rule("sgd");
    made->set_serving(group.serving());
  }
  return served;
}

}  // namespace

absl::StatusOr<RunSpec> ToRelayedSpec(const v1::GetRunResponse& run, const Config::Limits& limits) {
  const v1::RunSpec& spec = run.spec();
  auto made = ToRunSpec(WhatIsServed(spec), limits);
  if (!made.ok()) {
    return absl::FailedPreconditionError(absl::StrCat("this relay cannot serve run '", spec.run_id(),
                                                      "': ", made.status().message(),
                                                      "; update the relay, or raise its limits"));
  }
  const uint64_t chunk_elements = run.status().plan().chunk_elements();
  if (chunk_elements == 0 || chunk_elements > kMostChunkElements) {
    return absl::FailedPreconditionError(absl::StrCat("this relay cannot serve run '", spec.run_id(),
                                                      "', whose chunks have ", chunk_elements,
                                                      " elements; wanted: 1 to ", kMostChunkElements));
  }
  made->chunk_elements = chunk_elements;
  return made;
}

bool ServeTheSame(const RunSpec& a, const RunSpec& b) {
  return a.chunk_elements == b.chunk_elements &&
         std::equal(a.tensors.begin(), a.tensors.end(), b.tensors.begin(), b.tensors.end(),
                    [](const TensorSpec& one, const TensorSpec& other) {
                      return one.name == other.name && one.shape == other.shape && one.dtype == other.dtype &&
                             one.serving_format == other.serving_format && one.row_length == other.row_length;
                    });
}

Plan RelayedPlan(const RunSpec& spec, uint32_t readers) {
  Plan plan = MakePlan(spec);
  const uint64_t of_readers = Product(readers, Sum(VersionMessageBytes(plan), ReaderDigestBytes(plan)));
  plan.bytes = {.following = Sum(FollowMemoryBytes(spec, plan), of_readers)};
  plan.shards.resize(1);
  plan.shards[0] = {.bytes = plan.bytes};
  return plan;
}

}  // namespace ballast
