// Following a run: what its spec says of it, what a reader asks for, and what is shown.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "server/base/status_macros.h"
#include "server/base/utf8.h"
#include "server/convert/convert.h"

namespace ballast {
namespace {

constexpr uint32_t kMostFollowers = 1024, kMostTags = 256;

absl::Status CheckTagName(const std::string& name) {
  if (IsTagName(name)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("the name '", ValidUtf8(name, 80),
                   "': wanted 1 to 64 of a-z, 0-9, '-' and '.', the first and the last a letter or a digit"));
}

absl::StatusOr<VersionChoice> ToVersionChoice(const v1::VersionChoice& choice) {
  if (choice.has_id()) return VersionChoice{.id = ToVersionId(choice.id())};
  if (!choice.has_tag()) return absl::InvalidArgumentError("version is there, and has neither a tag nor an id");
  RETURN_IF_ERROR(CheckTagName(choice.tag()));
  return VersionChoice{.tag = choice.tag()};
}

std::string NameOf(kernels::WireIndex format) { return WireFormatAt(format).name; }

// Those that are not the format of all tensors anyway.
absl::StatusOr<std::vector<kernels::WireIndex>> ToFollowedFormats(const v1::FollowSpec& follow, const RunSpec& run) {
  std::vector<kernels::WireIndex> named, formats;
  for (int i = 0; i < follow.formats_size(); ++i) {
    const std::string at = absl::StrCat("follow.formats[", i, "]");
    ASSIGN_OR_RETURN(const auto format, ToWireFormat(follow.formats(i), &kernels::WireFormat::serving, at));
    if (std::find(named.begin(), named.end(), format) != named.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat(at, " is '", NameOf(format), "', which is there twice; name each format once"));
    }
    named.push_back(format);
    if (!IsServedIn(run, format)) formats.push_back(format);
  }
  return formats;
}

absl::Status CheckAlone(const v1::SubscribeRequest& request) {
  if (!request.has_version()) return absl::OkStatus();
  if (!request.has_have() && request.every() == 0 && !request.has_average() && request.format().empty()) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      "version is one version of the weights alone, as they were served, which comes whole: leave out `have`, `every`, "
      "`average` and `format`, or version");
}

// Of Subscribe and ListVersions, whose fields are called alike.
template <typename Request>
absl::StatusOr<WeightSeries> ToAverageSeries(const Request& request, const RunSpec& spec) {
  if (!request.format().empty()) {
    return absl::InvalidArgumentError(absl::StrCat("an average is followed as the weights are served, and format is '",
                                                   ValidUtf8(request.format(), 80), "': leave one of them out"));
  }
  WeightSeries series;
  ASSIGN_OR_RETURN(series.average, ToAverage(request.average(), spec));
  if (!spec.follow || spec.follow->averages) return series;
  return absl::FailedPreconditionError(
      absl::StrCat("run '", spec.run_id, "' keeps that average, and readers may follow its weights alone: create it ",
                   "with follow.averages, or amend it"));
}

template <typename Request>
absl::StatusOr<WeightSeries> SeriesOf(const Request& request, const RunSpec& spec) {
  if (request.has_average()) return ToAverageSeries(request, spec);
  if (request.format().empty()) return WeightSeries();
  ASSIGN_OR_RETURN(const auto format, ToWireFormat(request.format(), &kernels::WireFormat::serving, "format"));
  if (IsServedIn(spec, format)) return WeightSeries();
  const auto there = FollowedFormats(spec);
  if (!spec.follow || std::find(there.begin(), there.end(), format) != there.end()) {
    return WeightSeries{.format = format};
  }
  const auto name = [](std::string* out, kernels::WireIndex one) { out->append(NameOf(one)); };
  return absl::FailedPreconditionError(
      absl::StrCat("run '", spec.run_id, "' cannot be followed in format '", NameOf(format),
                   "': readers may follow it as it is served",
                   there.empty() ? "" : absl::StrCat(", or in ", absl::StrJoin(there, ", ", name)),
                   "; create it with that in follow.formats, or amend it"));
}

}  // namespace

VersionId ToVersionId(const v1::VersionId& id) {
  return {.epoch = id.epoch(), .generation = id.generation(), .step = id.step()};
}

absl::Status TakeFollow(const v1::RunSpec& spec, RunSpec* made) {
  if (!spec.has_follow()) return absl::OkStatus();
  if (spec.follow().readers() > kMostFollowers) {
    return absl::InvalidArgumentError(
        absl::StrCat("follow.readers is ", spec.follow().readers(), "; wanted: at most ", kMostFollowers));
  }
  if (spec.follow().tags() > kMostTags) {
    return absl::InvalidArgumentError(
        absl::StrCat("follow.tags is ", spec.follow().tags(), "; wanted: at most ", kMostTags));
  }
  if (spec.follow().averages() && spec.averages().empty()) {
    return absl::InvalidArgumentError(
        "follow.averages is set, and the run keeps no averages of its weights (averages): leave it unset, or name "
        "decays");
  }
  FollowSettings settings{.tags = spec.follow().tags(), .averages = spec.follow().averages()};
  ASSIGN_OR_RETURN(settings.formats, ToFollowedFormats(spec.follow(), *made));
  if (spec.follow().every() != 0) settings.every = spec.follow().every();
  if (spec.follow().readers() != 0) settings.readers = spec.follow().readers();
  made->follow = settings;
  return absl::OkStatus();
}

absl::StatusOr<WeightSeries> ToSeries(const v1::ListVersionsRequest& request, const RunSpec& spec) {
  return SeriesOf(request, spec);
}

absl::StatusOr<FollowOrder> ToFollowOrder(const v1::SubscribeRequest& request, const RunSpec& spec) {
  FollowOrder order{.every = request.every()};
  if (request.has_have()) order.have = ToVersionId(request.have());
  RETURN_IF_ERROR(CheckAlone(request));
  if (request.has_version()) {
    ASSIGN_OR_RETURN(order.version, ToVersionChoice(request.version()));
  }
  ASSIGN_OR_RETURN(order.series, SeriesOf(request, spec));
  order.digests.assign(request.digests().begin(), request.digests().end());
  if (order.digests.empty() || order.digests.size() == spec.tensors.size()) return order;
  return absl::InvalidArgumentError(absl::StrCat(order.digests.size(), " digests, and run '", spec.run_id, "' has ",
                                                 spec.tensors.size(), " tensors; wanted: one for each, or none"));
}

absl::StatusOr<FollowOrder> ToFollowOrder(const v1::PullRequest& request, const RunSpec& spec) {
  if (request.step() != 0 || request.slots_size() > 0 || request.parts_size() > 0 || request.has_average()) {
    return absl::InvalidArgumentError(
        "version is whole tensors of the weights as they were served after a step: leave out `step`, `slots`, `parts` "
        "and "
        "`average`, or version");
  }
  FollowOrder order;
  ASSIGN_OR_RETURN(order.version, ToVersionChoice(request.version()));
  ASSIGN_OR_RETURN(const std::vector<uint32_t> tensors, ToTensors(request, spec));
  const auto digests = static_cast<size_t>(request.digests_size());
  if (digests != 0 && digests != tensors.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat(digests, " digests for ", tensors.size(), " tensors; wanted: one for each, or none"));
  }
  order.tensors.resize(spec.tensors.size());
  if (digests != 0) order.digests.resize(spec.tensors.size());
  for (size_t k = 0; k < tensors.size(); ++k) {
    order.tensors[tensors[k]] = true;
    if (digests != 0) order.digests[tensors[k]] = request.digests(static_cast<int>(k));
  }
  return order;
}

absl::StatusOr<Followers::TagOrder> ToTagOrder(const v1::TagVersionRequest& request) {
  RETURN_IF_ERROR(CheckTagName(request.name()));
  Followers::TagOrder order{.order = {.name = request.name(), .replace = request.replace(), .mark = request.mark()}};
  if (request.has_only()) order.order.only = ToVersionId(request.only());
  if (request.has_version()) {
    ASSIGN_OR_RETURN(order.version, ToVersionChoice(request.version()));
  }
  return order;
}

v1::VersionId FromVersionId(const VersionId& id) {
  v1::VersionId out;
  out.set_step(id.step);
  out.set_generation(id.generation);
  out.set_epoch(id.epoch);
  return out;
}

v1::TaggedVersion FromTag(const VersionTag& tag) {
  v1::TaggedVersion out;
  out.set_name(tag.name);
  *out.mutable_id() = FromVersionId(tag.id);
  out.set_bytes(tag.bytes);
  out.set_closed_unix_s(tag.closed_unix_s);
  out.set_tagged_unix_s(tag.tagged_unix_s);
  out.set_file(tag.file);
  out.set_unreadable(tag.unreadable);
  out.set_mark(tag.mark);
  return out;
}

v1::ListVersionsResponse FromVersions(const Followers::VersionList& list) {
  v1::ListVersionsResponse out;
  if (list.newest != nullptr) {
    *out.mutable_newest() = FromVersionId(list.newest->id);
    out.set_newest_bytes(list.newest->bytes);
    out.set_newest_closed_unix_s(list.newest->closed_unix_s);
  }
  for (const VersionTag& tag : list.tags) *out.add_tags() = FromTag(tag);
  out.set_most_tags(list.most_tags);
  *out.mutable_current() = FromVersionId(list.current);
  return out;
}

v1::FollowStatus FromFollow(const FollowFigures& figures) {
  v1::FollowStatus out;
  out.set_readers(figures.readers.count);
  out.set_behind_seconds(figures.readers.behind_seconds);
  out.set_tags(static_cast<uint32_t>(figures.readers.tags));
  out.set_tag_bytes(figures.readers.tag_bytes);
  if (!figures.newest) return out;
  out.mutable_newest()->set_step(figures.newest->step);
  out.mutable_newest()->set_generation(figures.newest->generation);
  out.set_version_bytes(figures.newest->bytes);
  out.set_change_bytes(figures.newest->change_bytes);
  out.set_changed_ratio(figures.newest->changed_ratio);
  return out;
}

}  // namespace ballast
