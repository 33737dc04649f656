#include "client/cpp/ctl/command.h"

#include <google/protobuf/util/json_util.h>

#include "absl/strings/str_replace.h"

namespace ballast::ctl {

absl::StatusOr<std::unique_ptr<Client>> Connect(const Invocation& invocation) {
  auto client = Client::Connect({.server = invocation.server, .connect_timeout_s = invocation.timeout_s});
  if (client.ok()) return client;
  // The mend in the words of the command line.
  return absl::Status(client.status().code(),
                      absl::StrReplaceAll(client.status().message(), {{"server=\"host:port\"", "--server HOST:PORT"}}));
}

int Fail(const Invocation& invocation, const absl::Status& status) {
  invocation.err << "ballastctl: " << status.message() << "\n";
  return absl::IsUnavailable(status) ? kUnreachable : kRefused;
}

int PrintJson(const Invocation& invocation, const google::protobuf::Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.add_whitespace = true;
  options.always_print_primitive_fields = true;
  options.preserve_proto_field_names = true;
  std::string json;
  const auto status = google::protobuf::util::MessageToJsonString(message, &json, options);
  if (!status.ok()) return Fail(invocation, absl::InternalError(status.ToString()));
  invocation.out << json;
  return kOk;
}

}  // namespace ballast::ctl
