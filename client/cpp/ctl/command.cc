#include "client/cpp/ctl/command.h"

#include <google/protobuf/util/json_util.h>

#include <algorithm>
#include <string_view>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "proto/utf8.h"

#include "client/cpp/ctl/table.h"
#include "client/cpp/parts/server_list.h"
#include "client/cpp/transport/connection.h"

namespace ballast::ctl {

static constexpr char kMisuseUrl[] = "ballastctl/misuse";  // a status has this where the command line is at fault

// Whether a daemon can be there, before any is asked.
static absl::Status CheckServers(const std::string& servers) {
  const absl::StatusOr<std::vector<std::string>> each =
      servers.empty() ? std::vector<std::string>{""} : SplitServers(servers);
  absl::Status wrong = each.status();
  for (size_t i = 0; wrong.ok() && i < each->size(); ++i) wrong = CheckServer((*each)[i]);
  if (!wrong.ok()) wrong.SetPayload(kMisuseUrl, absl::Cord());
  return wrong;
}

std::vector<Invocation> OfEachDaemon(const Invocation& invocation) {
  std::vector<Invocation> each;
  for (const absl::string_view server : absl::StrSplit(invocation.server, ',')) {
    each.push_back(invocation);
    each.back().server = std::string(server);
  }
  return each;
}

absl::StatusOr<ClientOptions> OptionsOf(const Invocation& invocation) {
  if (invocation.server == "local") {
    return absl::InvalidArgumentError(
        "server 'local' is a daemon that a Python process has started for itself: give its address, unix:PATH, which a "
        "line on that process's stderr names, by --server or BALLAST_SERVER");
  }
  if (absl::Status wrong = CheckServers(invocation.server); !wrong.ok()) return wrong;
  return ClientOptions{.server = invocation.server,
                       .tls = invocation.tls,
                       .token_file = invocation.token_file,
                       .connect_timeout_s = invocation.timeout_s,
                       .reconnect_timeout_s = invocation.timeout_s};
}

absl::Status CheckWhole(const Invocation& invocation, Client& client, const std::string& run_id) {
  const auto run = client.GetRun(run_id);
  if (!run.ok() || !run->spec().has_part()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("the daemon at ", invocation.server, " has part ", run->spec().part().index(), " of ",
                   run->spec().part().count(), " of run '", run_id,
                   "', and taking it back alone may leave no step that all parts have: name all daemons of the run, "
                   "--server A,B,..., in their order, as its trainers do"));
}

absl::StatusOr<std::unique_ptr<Client>> Connect(const Invocation& invocation) {
  auto options = OptionsOf(invocation);
  if (!options.ok()) return options.status();
  auto client = Client::Connect(*std::move(options));
  if (client.ok()) return client;
  return InCommandLine(client.status());
}

bool IsMisuse(const absl::Status& status) { return status.GetPayload(kMisuseUrl).has_value(); }

absl::Status InCommandLine(const absl::Status& status) {
  return absl::Status(status.code(),
                      absl::StrReplaceAll(status.message(), {{"server=\"host:port\"", "--server HOST:PORT"}}));
}

int Fail(const Invocation& invocation, const absl::Status& status) {
  if (IsMisuse(status)) return Misused(invocation.err, status);
  invocation.err << "ballastctl: " << Visible(status.message()) << "\n";
  return absl::IsUnavailable(status) ? kUnreachable : kRefused;
}

int Misused(std::ostream& err, const absl::Status& status, const std::string& command) {
  err << "ballastctl: " << Visible(status.message()) << "\ntry `ballastctl " << command << (command.empty() ? "" : " ")
      << "--help`\n";
  return kUsage;
}

absl::StatusOr<uint64_t> WholeNumber(const std::string& name, const std::string& text) {
  uint64_t number = 0;
  if (absl::SimpleAtoi(text, &number)) return number;
  return absl::InvalidArgumentError(absl::StrCat(name, " is '", text, "'; wanted a whole number"));
}

absl::StatusOr<absl::Duration> Days(const Invocation& invocation, const std::string& otherwise) {
  const auto days = WholeNumber("--days", invocation.Get("days", otherwise));
  if (!days.ok()) return days.status();
  if (*days < 1 || *days > 3650) return absl::InvalidArgumentError("--days is from 1 to 3650");
  return absl::Hours(24) * static_cast<int64_t>(*days);
}

// The same JSON, in which what a terminal would obey is escaped: Protobuf leaves some of it. All beyond ASCII is in strings.
static std::string ForTerminal(const std::string& json) {
  std::string shown;
  for (std::string_view rest = json; !rest.empty();) {
    const std::string_view character = rest.substr(0, std::max<size_t>(Utf8CharacterLength(rest), 1));
    rest.remove_prefix(character.size());
    const char32_t code_point = CodePointOf(character);
    if (code_point >= 0x7F && IsUnseen(code_point)) {
      shown += JsonEscape(code_point);
    } else {
      shown += character;
    }
  }
  return shown;
}

static absl::StatusOr<std::string> ToJson(const google::protobuf::Message& message, bool whitespace) {
  google::protobuf::util::JsonPrintOptions options;
  options.add_whitespace = whitespace;
  options.always_print_primitive_fields = true;
  options.preserve_proto_field_names = true;
  std::string json;
  const auto status = google::protobuf::util::MessageToJsonString(message, &json, options);
  if (!status.ok()) return absl::InternalError(status.ToString());
  return ForTerminal(json);
}

int PrintJson(const Invocation& invocation, const google::protobuf::Message& message) {
  const auto json = ToJson(message, /*whitespace=*/true);
  if (!json.ok()) return Fail(invocation, json.status());
  invocation.out << *json;
  return kOk;
}

int PrintJsonLine(const Invocation& invocation, const google::protobuf::Message& message) {
  const auto json = ToJson(message, /*whitespace=*/false);
  if (!json.ok()) return Fail(invocation, json.status());
  invocation.out << *json << std::endl;
  return kOk;
}

}  // namespace ballast::ctl
