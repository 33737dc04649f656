#include <filesystem>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"

#include "client/cpp/ctl/authority.h"
#include "client/cpp/ctl/command.h"
#include "client/cpp/ctl/new_files.h"

namespace ballast::ctl {
namespace {

namespace fs = std::filesystem;

constexpr char kTrainerId[] = "spiffe://ballast/trainer";
// Clocks of other machines may be behind.
constexpr absl::Duration kBackdated = absl::Minutes(10);

absl::StatusOr<std::vector<NewFile>> MakeFiles(const std::vector<std::string>& hosts, const Validity& validity) {
  // By a name of its own, so that errors tell one authority from another.
  const std::string name = absl::StrCat("Ballast development CA ", absl::Hex(std::random_device{}() & 0xffffff));
  const auto authority = Authority::Make(name, validity);
  if (!authority.ok()) return authority.status();
  std::vector<std::string> names = {"localhost", "127.0.0.1", "::1"};
  names.insert(names.end(), hosts.begin(), hosts.end());
  auto daemon = authority->Issue(
      {.common_name = "ballastd", .end = TlsEnd::kDaemon, .names = std::move(names), .validity = validity});
  if (!daemon.ok()) return daemon.status();
  auto trainer =
      authority->Issue({.common_name = "trainer", .end = TlsEnd::kClient, .names = {kTrainerId}, .validity = validity});
  if (!trainer.ok()) return trainer.status();
  constexpr mode_t kForAll = 0644, kForOwner = 0600;
  return std::vector<NewFile>{
      {"ca.crt", authority->pem().certificate, kForAll}, {"ca.key", authority->pem().key, kForOwner},
      {"daemon.crt", daemon->certificate, kForAll},      {"daemon.key", daemon->key, kForOwner},
      {"trainer.crt", trainer->certificate, kForAll},    {"trainer.key", trainer->key, kForOwner}};
}

void PrintUse(const fs::path& folder, absl::Time not_after, std::ostream& out) {
  const std::string at = (folder / "").string();
  out << "made a development CA and two pairs that it signed in " << at << ", valid until "
      << absl::FormatTime("%Y-%m-%d", not_after, absl::UTCTimeZone()) << "\n\n"
      << "the daemon's configuration (ballastd --config FILE):\n\ntls:\n  certificate: " << at
      << "daemon.crt\n  key: " << at << "daemon.key\n  client_ca: " << at << "ca.crt\n\n"
      << "the environment of trainers and of ballastctl:\n\nexport BALLAST_TLS_CA=" << at
      << "ca.crt\nexport BALLAST_TLS_CERTIFICATE=" << at << "trainer.crt\nexport BALLAST_TLS_KEY=" << at
      << "trainer.key\n\nKeep ca.key: whoever has it makes pairs that the daemon takes.\n";
}

int Init(const Invocation& invocation) {
  if (invocation.arguments[0] != "init") {
    return Misused(invocation.err,
                   absl::InvalidArgumentError("certs knows init alone: ballastctl certs init --out DIR"), "certs");
  }
  if (!invocation.Has("out"))
    return Misused(invocation.err, absl::InvalidArgumentError("certs init wants --out DIR"), "certs");
  const auto valid_for = Days(invocation, "365");
  if (!valid_for.ok()) return Misused(invocation.err, valid_for.status(), "certs");
  std::vector<std::string> hosts;
  if (invocation.Has("host")) hosts = absl::StrSplit(invocation.Get("host", ""), ',');
  const absl::Time now = absl::Now();
  const Validity validity{.not_before = now - kBackdated, .not_after = now + *valid_for};
  const auto files = MakeFiles(hosts, validity);
  if (!files.ok()) return Fail(invocation, files.status());
  const fs::path folder = fs::absolute(invocation.Get("out", "")).lexically_normal();
  if (auto s = WriteNewFiles(folder, *files); !s.ok()) return Fail(invocation, s);
  PrintUse(folder, validity.not_after, invocation.out);
  return kOk;
}

}  // namespace

Command CertsCommand() {
  return {.name = "certs",
          .arguments = {"init"},
          .summary = "make a development CA, and pairs for the daemon and for trainers",
          .details =
              "Writes ca, daemon and trainer, each as .crt and .key, and prints what to configure. The daemon's is\n"
              "for localhost and the hosts named; the trainer's identity is spiffe://ballast/trainer. Nothing is\n"
              "overwritten.\n",
          .flags = {{"out", "DIR", "the folder, made if need be"},
                    {"host", "NAME...",
                     "a name or address of the daemon's host, as trainers write it; may come again, or a,b"},
                    {"days", "N", "how long they are valid; default 365"}},
          .prints_json = false,
          .run = Init};
}

}  // namespace ballast::ctl
