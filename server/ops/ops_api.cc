#include "server/ops/ops_api.h"

#include <google/protobuf/util/json_util.h>

#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

#include "server/base/clock.h"
#include "server/base/status_macros.h"

namespace ballast {
namespace {

absl::StatusOr<std::string> ToJson(const google::protobuf::Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.always_print_primitive_fields = true;
  options.preserve_proto_field_names = true;
  std::string json;
  const auto status = google::protobuf::util::MessageToJsonString(message, &json, options);
  if (!status.ok()) return absl::InternalError(absl::StrCat("no JSON: ", status.ToString()));
  return json;
}

absl::Status TakeNumber(absl::string_view value, const char* wanted, auto* number) {
  if (absl::SimpleAtoi(value, number)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(wanted, ", got '", value, "'"));
}

absl::StatusOr<v1::GetHistoryRequest> ToHistoryRequest(const std::string& run_id, const std::string& query) {
  uint64_t after = 0;
  uint32_t most = OpsApi::kMostSteps;
  for (const absl::string_view part : absl::StrSplit(query, '&', absl::SkipEmpty())) {
    const std::pair<absl::string_view, absl::string_view> key_value = absl::StrSplit(part, absl::MaxSplits('=', 1));
    const auto& [key, value] = key_value;
    if (key == "after") {
      RETURN_IF_ERROR(TakeNumber(value, "after wants a step's number", &after));
    } else if (key == "most") {
      RETURN_IF_ERROR(TakeNumber(value, "most wants a number of steps", &most));
    } else {
      return absl::InvalidArgumentError(absl::StrCat("history takes after=STEP and most=N, got '", key, "'"));
    }
  }
  v1::GetHistoryRequest request;
  request.set_run_id(run_id);
  request.set_after_step(after);
  request.set_most_steps(most == 0 || most > OpsApi::kMostSteps ? OpsApi::kMostSteps : most);
  return request;
}

OpsResponse FromStatus(const absl::Status& status) {
  const int code = absl::IsInvalidArgument(status) ? 400
                   : absl::IsNotFound(status)      ? 404
                   : absl::IsUnavailable(status)   ? 503
                                                   : 500;
  return {.status = code, .body = absl::StrCat(status.message(), "\n")};
}

OpsResponse FromJson(std::string json) {
  return {.content_type = "application/json; charset=utf-8", .body = std::move(json)};
}

}  // namespace

absl::StatusOr<std::string> OpsApi::Make(const std::string& path, const std::string& query) const {
  const std::vector<std::string> parts = absl::StrSplit(path, '/');
  const bool is_history = parts.size() == 3 && parts[0] == "runs" && parts[2] == "history";
  if (!query.empty() && !is_history) {
    return absl::InvalidArgumentError(absl::StrCat("/api/v1/", path, " takes no query, got '", query, "'"));
  }
  if (path == "status") return ToJson(status_->GetServer());
  if (path == "runs") return ToJson(status_->ListRuns());
  if (is_history) {
    ASSIGN_OR_RETURN(const v1::GetHistoryRequest request, ToHistoryRequest(parts[1], query));
    ASSIGN_OR_RETURN(const v1::GetHistoryResponse history, status_->GetHistory(request));
    return ToJson(history);
  }
  const bool is_run = parts.size() == 2 && parts[0] == "runs";
  const bool is_spec = parts.size() == 3 && parts[0] == "runs" && parts[2] == "spec";
  if (!is_run && !is_spec) {
    return absl::NotFoundError("Not found; there are /api/v1/status, runs, runs/ID, runs/ID/spec and runs/ID/history");
  }
  ASSIGN_OR_RETURN(v1::GetRunResponse run, status_->GetRun(parts[1]));
  if (is_run) return ToJson(run.status());
  run.mutable_spec()->clear_tensors();  // up to 100,000
  return ToJson(run.spec());
}

OpsResponse OpsApi::Answer(const std::string& path, const std::string& query) {
  const std::string key = absl::StrCat(path, "?", query);
  {
    absl::MutexLock lock(&mu_);
    const double now_s = MonotonicSeconds();
    std::erase_if(kept_, [now_s](const auto& kept) { return now_s - kept.second.made_at_s > kFreshS; });
    if (const auto kept = kept_.find(key); kept != kept_.end()) return FromJson(kept->second.json);
  }
  absl::StatusOr<std::string> json = Make(path, query);
  absl::MutexLock lock(&mu_);
  if (!json.ok()) return FromStatus(json.status());
  kept_[key] = {.made_at_s = MonotonicSeconds(), .json = *json};
  return FromJson(*std::move(json));
}

}  // namespace ballast
