#include "server/access/access_list.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <set>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "proto/access_words.h"
#include "proto/amounts.h"
#include "proto/run_names.h"
#include "proto/tls/certificate_files.h"
#include "proto/tls/sha256.h"
#include "yaml-cpp/yaml.h"

#include "server/base/status_macros.h"
#include "server/config/config_schema.h"

namespace ballast {
namespace {

// Whether a grant's text, in which a * at the end stands for any rest, names that.
bool Matches(absl::string_view pattern, absl::string_view text) {
  return absl::EndsWith(pattern, "*") ? absl::StartsWith(text, pattern.substr(0, pattern.size() - 1)) : pattern == text;
}

// And not that of nothing, which a shell makes of a variable that is not set.
bool IsSha256(const std::string& text) {
  return text.size() == 64 && text != Sha256Hex("") && std::all_of(text.begin(), text.end(), [](char c) {
           return absl::ascii_isdigit(static_cast<unsigned char>(c)) || (c >= 'a' && c <= 'f');
         });
}

// A star anywhere but at the end would look as if it meant something.
bool IsPattern(const std::string& text) {
  return !text.empty() && absl::StripSuffix(text, "*").find('*') == absl::string_view::npos;
}

constexpr absl::string_view kGrantKeys =
    "name, token_sha256, identity, runs, scope, expires, most_runs, most_bytes, most_streams, most_requests";

// yaml-cpp's accessors throw on misuse: only AccessList::Parse calls this.
class GrantReader {
 public:
  GrantReader(const std::string& file, const Quota& usual) : file_(file), usual_(usual) {}

  absl::Status Wrong(const YAML::Mark& at, absl::string_view problem) const {
    return absl::FailedPreconditionError(absl::StrCat(file_, ":", at.line + 1, ": ", problem));
  }

  absl::StatusOr<std::vector<Grant>> ReadFile(const YAML::Node& root) const {
    const YAML::Node grants = root.IsMap() ? root["grants"] : YAML::Node(YAML::NodeType::Undefined);
    if (!grants || root.size() != 1 || !grants.IsSequence()) {
      return Wrong(root.Mark(), "wanted the one key 'grants' with a list under it");
    }
    if (grants.size() > AccessList::kMostGrants) {
      return Wrong(grants.Mark(), absl::StrCat(grants.size(), " grants; at most ", AccessList::kMostGrants));
    }
    std::vector<Grant> read;
    std::set<std::string> names;
    size_t runs = 0;
    for (const YAML::Node& node : grants) {
      ASSIGN_OR_RETURN(Grant grant, ReadGrant(node));
      if (!names.insert(grant.name).second) {
        return Wrong(node.Mark(), absl::StrCat("the name '", grant.name, "' comes twice; give each grant its own"));
      }
      runs += grant.runs.size();
      if (runs > AccessList::kMostRuns) {
        return Wrong(node.Mark(),
                     absl::StrCat("more than ", AccessList::kMostRuns, " runs in all; use a * at their ends"));
      }
      read.push_back(std::move(grant));
    }
    return read;
  }

 private:
  absl::StatusOr<Grant> ReadGrant(const YAML::Node& node) const {
    if (!node.IsMap()) return Wrong(node.Mark(), absl::StrCat("a grant is a section: ", kGrantKeys));
    Grant grant;
    grant.quota = usual_;
    std::set<std::string> seen;
    for (const auto& entry : node) {
      const std::string key = entry.first.IsScalar() ? entry.first.Scalar() : "";
      if (!seen.insert(key).second) return Wrong(entry.first.Mark(), absl::StrCat("key '", key, "' comes twice"));
      RETURN_IF_ERROR(ReadKey(key, entry.first.Mark(), entry.second, &grant));
    }
    for (const char* key : {"name", "runs", "scope"}) {
      if (!seen.contains(key)) return Wrong(node.Mark(), absl::StrCat("the grant has no '", key, "'"));
    }
    if (grant.token_sha256.empty() && grant.identity.empty()) {
      return Wrong(node.Mark(),
                   absl::StrCat("grant '", grant.name, "' is anybody's; give it token_sha256, or identity"));
    }
    return grant;
  }

  absl::Status ReadKey(const std::string& key, const YAML::Mark& at, const YAML::Node& value, Grant* grant) const {
    if (key == "runs") return ReadRuns(at, value, grant);
    if (!value.IsScalar()) return Wrong(at, absl::StrCat("'", key, "' wants one value"));
    const std::string text = value.Scalar();
    if (key == "name") {
      grant->name = text;
      return IsGrantName(text) ? absl::OkStatus() : Wrong(at, "a name is of letters, digits and . _ -, at most 128");
    }
    if (key == "token_sha256") {
      grant->token_sha256 = text;
      // Not shown: it may be the token itself, by mistake.
      return IsSha256(text)
                 ? absl::OkStatus()
                 : Wrong(at, "token_sha256 wants the 64 hex digits, in lower case, that `ballastctl token new` prints");
    }
    if (key == "identity") {
      grant->identity = text;
      return IsPattern(text) ? absl::OkStatus() : Wrong(at, "an identity may have a * at its end alone");
    }
    if (key == "scope") return ReadScope(at, text, grant);
    if (key == "expires") return ReadExpiry(at, text, grant);
    if (absl::StartsWith(key, "most_")) return ReadQuota(key, at, text, &grant->quota);
    return UnknownKey(key, at);
  }

  absl::Status UnknownKey(const std::string& key, const YAML::Mark& at) const {
    return Wrong(at, absl::StrCat("unknown key '", key, "'; there are: ", kGrantKeys));
  }

  absl::Status ReadQuota(const std::string& key, const YAML::Mark& at, const std::string& text, Quota* quota) const {
    const auto count = [&](uint32_t* into) -> absl::Status {
      const absl::StatusOr<uint64_t> read = ReadCount(text);
      if (!read.ok() || *read > kMostOfQuota) {
        return Wrong(at, absl::StrCat(key, " '", text, "' is no whole number from 0, any number, to ", kMostOfQuota));
      }
      *into = static_cast<uint32_t>(*read);
      return absl::OkStatus();
    };
    if (key == "most_runs") return count(&quota->runs);
    if (key == "most_streams") return count(&quota->streams);
    if (key == "most_requests") return count(&quota->requests);
    if (key != "most_bytes") return UnknownKey(key, at);
    const absl::StatusOr<uint64_t> bytes = ReadBytes(text);
    if (!bytes.ok()) return Wrong(at, absl::StrCat(key, ": ", bytes.status().message()));
    quota->bytes = *bytes;
    return absl::OkStatus();
  }

  absl::Status ReadRuns(const YAML::Mark& at, const YAML::Node& value, Grant* grant) const {
    if (!value.IsSequence() || value.size() == 0) return Wrong(at, "'runs' wants a list of names, such as [team-a-*]");
    for (const YAML::Node& run : value) {
      if (!run.IsScalar() || !IsPattern(run.Scalar()))
        return Wrong(run.Mark(), "a run's name may have a * at its end alone");
      if (!IsRunPattern(run.Scalar()))
        return Wrong(run.Mark(), absl::StrCat("no run is called '", run.Scalar(), "': a name is ", kRunNameRule));
      grant->runs.push_back(run.Scalar());
    }
    return absl::OkStatus();
  }

  absl::Status ReadScope(const YAML::Mark& at, const std::string& text, Grant* grant) const {
    const auto found = std::find(kScopeNames.begin(), kScopeNames.end(), text);
    if (found == kScopeNames.end()) {
      return Wrong(at, absl::StrCat("scope '", text, "' is none of ", absl::StrJoin(kScopeNames, ", ")));
    }
    grant->scope = static_cast<Scope>(found - kScopeNames.begin());
    return absl::OkStatus();
  }

  absl::Status ReadExpiry(const YAML::Mark& at, const std::string& text, Grant* grant) const {
    std::string error;
    if (absl::ParseTime(absl::RFC3339_full, text, &grant->expires, &error) ||
        absl::ParseTime("%Y-%m-%d", text, &grant->expires, &error)) {
      return absl::OkStatus();
    }
    return Wrong(at, absl::StrCat("expires '", text, "' is no time such as 2027-01-31 or 2027-01-31T12:00:00Z"));
  }

  const std::string file_;
  const Quota usual_;
};

bool Brings(const Caller& caller, const Grant& grant) {
  return (grant.token_sha256.empty() || grant.token_sha256 == caller.token_sha256) &&
         (grant.identity.empty() || (!caller.identity.empty() && Matches(grant.identity, caller.identity)));
}

absl::Status Unknown(const Caller& caller) {
  if (!caller.token_sha256.empty()) {
    return absl::UnauthenticatedError(
        "the daemon does not know this token: ask its operator for one, whose hash is in the file of the key access");
  }
  const std::string certificate =
      caller.identity.empty() ? "" : absl::StrCat(", and has no grant for the certificate of ", caller.identity);
  return absl::UnauthenticatedError(
      absl::StrCat("the daemon wants a token", certificate, ": give token_file, or set BALLAST_TOKEN_FILE"));
}

}  // namespace

absl::string_view ScopeName(Scope scope) { return kScopeNames[static_cast<size_t>(scope)]; }

bool Grant::Covers(absl::string_view run) const {
  return std::any_of(runs.begin(), runs.end(), [&](const std::string& pattern) { return Matches(pattern, run); });
}

absl::StatusOr<AccessList> AccessList::Parse(const std::string& text, const std::string& file, const Quota& usual) {
  const GrantReader reader(file, usual);
  AccessList list;
  try {
    const std::vector<YAML::Node> documents = YAML::LoadAll(text);
    if (documents.size() > 1)
      return reader.Wrong(documents[1].Mark(), "a second YAML document starts here; there is one");
    ASSIGN_OR_RETURN(list.grants_, reader.ReadFile(documents.empty() ? YAML::Node() : documents[0]));
  } catch (const YAML::Exception& e) {
    return reader.Wrong(e.mark, absl::StrCat("not YAML: ", e.msg));
  }
  return list;
}

absl::StatusOr<AccessList> AccessList::Read(const std::string& file, const Quota& usual) {
  struct stat found = {};
  if (stat(file.c_str(), &found) != 0) {
    return absl::FailedPreconditionError(absl::StrCat(file, ": cannot be read: ", std::strerror(errno)));
  }
  if (found.st_uid != 0 && found.st_uid != geteuid()) {
    return absl::FailedPreconditionError(
        absl::StrCat(file, ": is user ", found.st_uid, "'s; it must be root's or the daemon's user's"));
  }
  if ((found.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        file, ": others than its owner can write it, and could give themselves any grant; chmod go-w ", file));
  }
  ASSIGN_OR_RETURN(const std::string text, ReadSmallFile(file));
  return Parse(text, file, usual);
}

absl::StatusOr<const Grant*> AccessList::Find(const Caller& caller, Scope scope, std::optional<absl::string_view> run,
                                              absl::Time now) const {
  const Grant* less = nullptr;
  const Grant* expired = nullptr;
  for (const Grant& grant : grants_) {
    if (!Brings(caller, grant)) continue;
    if (grant.expires <= now) {
      expired = &grant;
    } else if (!run || (grant.scope >= scope && grant.Covers(*run))) {
      return &grant;
    } else if (less == nullptr || grant.Covers(*run)) {
      less = &grant;
    }
  }
  if (less != nullptr) {
    return absl::PermissionDeniedError(absl::StrCat("grant '", less->name, "' gives ", ScopeName(less->scope), " on ",
                                                    absl::StrJoin(less->runs, ", "), "; this call wants ",
                                                    ScopeName(scope), " on run '", *run, "'"));
  }
  if (expired == nullptr) return Unknown(caller);
  return absl::UnauthenticatedError(
      absl::StrCat("grant '", expired->name, "' expired at ",
                   absl::FormatTime(absl::RFC3339_sec, expired->expires, absl::UTCTimeZone()),
                   "; ask the daemon's operator for a new one"));
}

std::vector<const Grant*> AccessList::ExpiringBy(absl::Time time) const {
  std::vector<const Grant*> expiring;
  for (const Grant& grant : grants_) {
    if (grant.expires <= time && grant.expires != absl::InfiniteFuture()) expiring.push_back(&grant);
  }
  std::stable_sort(expiring.begin(), expiring.end(), [](auto* a, auto* b) { return a->expires < b->expires; });
  return expiring;
}

}  // namespace ballast
