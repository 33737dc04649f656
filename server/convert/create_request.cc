#include "server/convert/create_request.h"

#include "proto/tls/sha256.h"

#include "server/base/status_macros.h"
#include "server/convert/canonical_spec.h"
#include "server/convert/checkpoint_json.h"
#include "server/convert/convert.h"

namespace ballast {
namespace {

std::string Difference(const std::string& existing, const std::string& asked) {
  v1::RunSpec a, b;
  if (!a.ParseFromString(existing) || !b.ParseFromString(asked)) return "it cannot be read";
  return FirstDifference(a, b).value_or("in nothing that can be named");
}

}  // namespace

absl::StatusOr<RunRegistry::CreateRequest> ToCreateRequest(const v1::RunSpec& spec, const Config::Limits& limits,
                                                           bool has_storage) {
  RunRegistry::CreateRequest made;
  made.difference = Difference;
  ASSIGN_OR_RETURN(made.spec, ToRunSpec(spec, limits, has_storage));
  made.canonical_spec = SerializeCanonical(Canonical(spec, has_storage));
  made.spec_sha256 = Sha256Hex(made.canonical_spec);
  return made;
}

absl::StatusOr<RunRegistry::CreateRequest> ToCreateRequest(const std::string& spec_json, const std::string& sha256,
                                                           const std::string& file, const Config::Limits& limits) {
  ASSIGN_OR_RETURN(const v1::RunSpec spec, ReadSpecJson(spec_json, sha256, file));
  return ToCreateRequest(spec, limits, /*has_storage=*/true);
}

}  // namespace ballast
