// RunSpec: from the wire's to the daemon's.
#include <algorithm>
#include <cmath>
#include <limits>
#include <unordered_set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "proto/checkpoint/safetensors_header.h"
#include "proto/checksum.h"
#include "proto/known_fields.h"
#include "proto/run_names.h"

#include "server/base/status_macros.h"
#include "server/base/utf8.h"
#include "server/convert/convert.h"
#include "server/plan/credit.h"

namespace ballast {
namespace {

using absl::InvalidArgumentError;
using absl::StrCat;

// 2^40 elements are 4 TiB of fp32: past any machine this runs on, and far from overflow in sums of bytes.
constexpr int64_t kMostElements = int64_t{1} << 40;
constexpr int kMostDimensions = 32;
constexpr int kMostGroups = 1024;

absl::StatusOr<uint64_t> CountElements(const v1::TensorSpec& t, const std::string& at) {
  if (t.shape_size() > kMostDimensions) {
    return InvalidArgumentError(
        StrCat(at, ".shape has ", t.shape_size(), " dimensions; wanted: at most ", kMostDimensions));
  }
  int64_t elements = 1;
  for (const int64_t size : t.shape()) {
    if (size < 0) return InvalidArgumentError(StrCat(at, ".shape has the size ", size, "; wanted: at least 1"));
    if (size == 0) {
      return InvalidArgumentError(StrCat(at, ".shape has the size 0: there is nothing to train; leave the tensor out"));
    }
    if (size > kMostElements / elements) {
      return InvalidArgumentError(StrCat(at, ".shape [", absl::StrJoin(t.shape(), ", "), "] has more than ",
                                         kMostElements, " elements; split the tensor"));
    }
    elements *= size;
  }
  return static_cast<uint64_t>(elements);
}

absl::Status CheckName(const v1::TensorSpec& t, const std::string& at, const Config::Limits& limits, bool has_storage) {
  if (t.name().empty()) return InvalidArgumentError(StrCat(at, ".name is empty; every tensor needs a name of its own"));
  if (t.name().size() > limits.name_bytes) {
    return InvalidArgumentError(StrCat(at, ".name '", ValidUtf8(t.name(), 64), "...' has ", t.name().size(),
                                       " bytes; wanted: at most ", limits.name_bytes, " (limits.name_bytes)"));
  }
  if (has_storage && t.name() == kReservedTensorName) {
    return InvalidArgumentError(
        StrCat(at, ".name is '", kReservedTensorName,
               "', which is no tensor in a safetensors file, and this daemon writes its runs to such files "
               "(storage.dir); name it otherwise"));
  }
  if (ValidUtf8(t.name()) != t.name()) {
    return InvalidArgumentError(StrCat(at, ".name '", ValidUtf8(t.name(), 64), "' is not valid UTF-8"));
  }
  return absl::OkStatus();
}

absl::Status CheckScale(const std::string& at, double scale) {
  if (std::isfinite(scale) && scale >= 0) return absl::OkStatus();
  return InvalidArgumentError(StrCat(at, " is ", scale, "; wanted: a finite number, at least 0"));
}

absl::Status ResolveFormats(const v1::TensorSpec& t, const v1::GroupSpec& group, const std::string& at,
                            TensorSpec* made) {
  ASSIGN_OR_RETURN(made->dtype, ToWireFormat(t.dtype(), &kernels::WireFormat::gradient, at + ".dtype"));
  made->gradient_format = group.gradient().empty() ? made->dtype : kernels::FindWireFormat(group.gradient());
  const std::string& serving = group.serving().empty() ? t.dtype() : group.serving();
  const std::string field = group.serving().empty() ? at + ".dtype, and so the group's serving," : at + ".serving";
  ASSIGN_OR_RETURN(made->serving_format, ToWireFormat(serving, &kernels::WireFormat::serving, field));
  made->row_length = RowLength(*made, made->serving_format);
  return absl::OkStatus();
}

absl::StatusOr<TensorSpec> ToTensor(const v1::TensorSpec& t, const v1::RunSpec& spec, const std::string& at) {
  TensorSpec made{.name = t.name(), .group = t.group()};
  ASSIGN_OR_RETURN(made.elements, CountElements(t, at));
  made.shape.assign(t.shape().begin(), t.shape().end());
  if (t.group() >= static_cast<uint32_t>(spec.groups_size())) {
    return InvalidArgumentError(StrCat(at, ".group is ", t.group(), ", but there are ", spec.groups_size(), " groups"));
  }
  RETURN_IF_ERROR(ResolveFormats(t, spec.groups(static_cast<int>(t.group())), at, &made));
  if (t.has_lr_scale()) made.lr_scale = t.lr_scale();
  if (t.has_wd_scale()) made.wd_scale = t.wd_scale();
  RETURN_IF_ERROR(CheckScale(at + ".lr_scale", made.lr_scale));
  RETURN_IF_ERROR(CheckScale(at + ".wd_scale", made.wd_scale));
  made.key = NameKey(made.name, spec.seed());
  return made;
}

// Of a rule over matrices. Later dimensions count as one: a convolution's filters are rows.
absl::Status CheckMatrix(const TensorSpec& t, const GroupSpec& group, const std::string& at) {
  if (group.kernel->fit == nullptr) return absl::OkStatus();
  constexpr uint64_t kMostSide = std::numeric_limits<int32_t>::max();  // of libraries of products
  if (t.shape.size() < 2) {
    return InvalidArgumentError(StrCat(at, ".shape is [", absl::StrJoin(t.shape, ", "), "], and its group's rule, ",
                                       group.kernel->rule, ", is over matrices: give it a group with another rule"));
  }
  if (MatrixRows(t) <= kMostSide && t.elements / MatrixRows(t) <= kMostSide) return absl::OkStatus();
  return InvalidArgumentError(StrCat(at, ".shape [", absl::StrJoin(t.shape, ", "), "] is a matrix with a side of over ",
                                     kMostSide, ", and its group's rule is ", group.kernel->rule,
                                     ": give it a group with another rule"));
}

absl::Status CheckCounts(const v1::RunSpec& spec, const Config::Limits& limits) {
  if (!IsRunName(spec.run_id())) {
    return InvalidArgumentError(StrCat("run_id is '", ValidUtf8(spec.run_id(), 80), "'; wanted: ", kRunNameRule));
  }
  if (spec.tensors_size() == 0) return InvalidArgumentError("tensors is empty; a run trains at least one tensor");
  if (static_cast<uint32_t>(spec.tensors_size()) > limits.tensors) {
    return InvalidArgumentError(
        StrCat("tensors has ", spec.tensors_size(), " entries; wanted: at most ", limits.tensors, " (limits.tensors)"));
  }
  if (spec.groups_size() == 0) return InvalidArgumentError("groups is empty; name at least one group with its rule");
  if (spec.groups_size() > kMostGroups) {
    return InvalidArgumentError(StrCat("groups has ", spec.groups_size(), " entries; wanted: at most ", kMostGroups));
  }
  return absl::OkStatus();
}

// A chunk of the widest format must fit a message with room for its header.
uint64_t ChunkElements(const Config::Limits& limits) {
  constexpr uint64_t kHeader = 1024, kWidest = 4;
  const uint64_t message = limits.message_bytes > kHeader ? limits.message_bytes - kHeader : 0;
  const uint64_t tiles = std::min(limits.chunk_bytes, message) / kWidest / kernels::kTile;
  return std::max<uint64_t>(tiles, 1) * kernels::kTile;
}

// A rank that is lost must be left out before the steps that await it are closed, each of which awaits it anew.
absl::Status CheckPatience(const RunSpec& spec) {
  const double patience_s = spec.lease_s + spec.rank_timeout_s;
  if (!spec.leaves_out_lost || spec.step_timeout_s == 0 || spec.step_timeout_s >= patience_s) return absl::OkStatus();
  return InvalidArgumentError(StrCat("step_timeout_s is ", spec.step_timeout_s,
                                     ", and on_lost_rank is continue: a lost rank is left out after the lease and "
                                     "rank_timeout_s, ",
                                     patience_s, " s; choose at least as much, or a shorter rank_timeout_s"));
}

}  // namespace

absl::StatusOr<RunSpec> ToRunSpec(const v1::RunSpec& spec, const Config::Limits& limits, bool has_storage) {
  RETURN_IF_ERROR(CheckCounts(spec, limits));  // before each of them is looked at
  RETURN_IF_ERROR(CheckKnownFields(spec));
  RunSpec made{.run_id = spec.run_id(), .seed = spec.seed()};
  RETURN_IF_ERROR(TakePolicies(spec, &made));
  RETURN_IF_ERROR(TakeRewind(spec, &made));
  RETURN_IF_ERROR(TakePart(spec, &made));
  RETURN_IF_ERROR(TakeAverages(spec, &made));
  RETURN_IF_ERROR(TakeCheckpoints(spec, has_storage, &made));
  if (spec.stats_every() != 0) made.stats_every = spec.stats_every();
  made.chunk_elements = ChunkElements(limits);
  made.lease_s = limits.lease_s;
  RETURN_IF_ERROR(CheckPatience(made));
  made.layer_groups = limits.layer_groups;
  made.pull_timeout_s = limits.pull_timeout_s;
  for (int i = 0; i < spec.groups_size(); ++i) {
    ASSIGN_OR_RETURN(GroupSpec group, ToGroupSpec(spec.groups(i), StrCat("groups[", i, "]")));
    made.groups.push_back(std::move(group));
  }
  std::unordered_set<std::string> names;
  for (int i = 0; i < spec.tensors_size(); ++i) {
    const v1::TensorSpec& t = spec.tensors(i);
    RETURN_IF_ERROR(CheckName(t, StrCat("tensors[", i, "]"), limits, has_storage));
    if (!names.insert(t.name()).second) {
      return InvalidArgumentError(
          StrCat("tensors[", i, "].name '", t.name(), "' is there twice; every tensor needs a name of its own"));
    }
    const std::string at = StrCat("tensors[", i, "] '", t.name(), "'");
    ASSIGN_OR_RETURN(TensorSpec tensor, ToTensor(t, spec, at));
    RETURN_IF_ERROR(CheckMatrix(tensor, made.groups[tensor.group], at));
    made.tensors.push_back(std::move(tensor));
  }
  RETURN_IF_ERROR(TakeFollow(spec, &made));
  made.credit_bytes = CreditBytes(made, limits.credit_bytes);
  RETURN_IF_ERROR(TakeSpikes(spec, &made));
  return made;
}

}  // namespace ballast
