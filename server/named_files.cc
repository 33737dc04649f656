#include "server/named_files.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "proto/tls/certificate_files.h"
#include "proto/tls/token_file.h"

#include "server/base/child_process.h"
#include "server/storage/storage.h"

namespace ballast {
namespace {

ConfigError Fault(std::string path, const absl::Status& status) {
  return {.path = std::move(path), .problem = std::string(status.message())};
}

ConfigError CheckProgramOf(const Config::Storage& storage) {
  if (storage.on_published.empty()) return {};
  const absl::Status found = CheckProgram(storage.on_published[0]);
  if (found.ok()) return {};
  return {.path = "storage.on_published",
          .problem = absl::StrCat(found.message(), "; name a program that is there, or leave the key out")};
}

ConfigError CheckImportDir(const Config::Storage& storage) {
  const std::string folder = ImportDir(storage);
  if (folder.empty()) return {};
  const absl::Status listed = SystemFs()->List(folder).status();
  if (listed.ok()) return {};
  return {.path = "storage.import_dir",
          .problem = absl::StrCat(listed.message(),
                                  "; make the folder, readable for the daemon's user, or leave the key out")};
}

// What a start opens, or makes where it is not there.
ConfigError CheckStorageDir(const Config::Storage& storage) {
  if (!storage.on()) return {};
  const absl::Status listed = AdviseOnFolder(SystemFs()->List(storage.dir).status());
  if (!listed.ok()) return Fault("storage.dir", listed);
  const std::string runs = absl::StrCat(storage.dir, "/runs"), lock = absl::StrCat(storage.dir, "/ballast.lock");
  for (const auto& [path, rights] :
       {std::pair(storage.dir, R_OK | W_OK | X_OK), {runs, R_OK | W_OK | X_OK}, {lock, R_OK | W_OK}}) {
    if (faccessat(AT_FDCWD, path.c_str(), rights, AT_EACCESS) == 0 || (errno == ENOENT && path != storage.dir))
      continue;
    return Fault("storage.dir", AdviseOnFolder(absl::PermissionDeniedError(
                                    absl::StrCat(path, " cannot be written to: ", std::strerror(errno)))));
  }
  return {};
}

ConfigError CheckRelayFiles(const Config::Relay& relay) {
  if (!relay.on()) return {};
  const absl::Time now = absl::Now();
  if (!relay.ca.empty()) {
    if (auto s = ReadAuthorities(relay.ca, now).status(); !s.ok()) return Fault("relay.ca", s);
  }
  if (!relay.certificate.empty()) {
    const absl::Status pair = ReadCertifiedKey(relay.certificate, relay.key, TlsEnd::kClient, now).status();
    if (!pair.ok()) return Fault(IsAboutKey(pair) ? "relay.key" : "relay.certificate", pair);
  }
  if (relay.token_file.empty()) return {};
  const absl::Status token = ReadToken(relay.token_file).status();
  return token.ok() ? ConfigError() : Fault("relay.token_file", token);
}

}  // namespace

std::string ImportDir(const Config::Storage& storage) {
  return storage.import_dir == "off" ? "" : std::string(absl::StripSuffix(storage.import_dir, "/"));
}

absl::Status CheckStorageNames(const Config::Storage& storage) {
  for (const ConfigError& wrong : {CheckProgramOf(storage), CheckImportDir(storage)}) {
    if (!wrong.path.empty()) return absl::FailedPreconditionError(absl::StrCat(wrong.path, ": ", wrong.problem));
  }
  return absl::OkStatus();
}

ConfigError CheckNamedFiles(const Config& config) {
  for (const auto& check : {CheckStorageDir, CheckProgramOf, CheckImportDir}) {
    if (ConfigError wrong = check(config.storage); !wrong.path.empty()) return wrong;
  }
  return CheckRelayFiles(config.relay);
}

}  // namespace ballast
