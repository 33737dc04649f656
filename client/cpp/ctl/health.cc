// grpc.health.v1.Health/Check, as load balancers and Kubernetes call it. Its two messages have one field each, so they
// are encoded by hand: the distributions ship no stub for it.
#include <google/protobuf/struct.pb.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "proto/unix_address.h"

#include "client/cpp/ctl/command.h"
#include "client/cpp/transport/tls_account.h"

namespace ballast::ctl {
namespace {

constexpr char kServing[] = "SERVING";
constexpr char kService[] = "ballast.v1.TrainerService";

// HealthCheckRequest{string service = 1}.
grpc::ByteBuffer Request() {
  std::string message = "\x0a";
  message += static_cast<char>(sizeof(kService) - 1);
  message += kService;
  const grpc::Slice slice(message);
  return grpc::ByteBuffer(&slice, 1);
}

// HealthCheckResponse{ServingStatus status = 1}; absent is 0.
std::string Status(const grpc::ByteBuffer& response) {
  grpc::Slice slice;
  if (!response.DumpToSingleSlice(&slice).ok()) return "UNKNOWN";
  const char* const names[] = {"UNKNOWN", kServing, "NOT_SERVING", "SERVICE_UNKNOWN"};
  const size_t value = slice.size() == 2 && slice.begin()[0] == 0x08 ? slice.begin()[1] : 0;
  return value < 4 ? names[value] : "UNKNOWN";
}

absl::StatusOr<std::string> Check(const Invocation& invocation, const std::string& server, double timeout_s) {
  const auto credentials = CredentialsFor(server, invocation.tls);
  if (!credentials.ok()) return credentials.status();
  grpc::GenericStub stub(grpc::CreateChannel(ForGrpc(server), *credentials));
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(timeout_s)));
  grpc::CompletionQueue queue;
  const auto call = stub.PrepareUnaryCall(&context, "/grpc.health.v1.Health/Check", Request(), &queue);
  grpc::ByteBuffer response;
  grpc::Status status;
  call->StartCall();
  call->Finish(&response, &status, nullptr);
  void* tag = nullptr;
  bool ok = false;
  queue.Next(&tag, &ok);
  if (status.ok()) return Status(response);
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()),
                      absl::StrCat("health check of ", server, ": ", status.error_message()));
}

absl::StatusOr<std::string> HealthOf(const Invocation& invocation) {
  const auto client = Connect(invocation);  // for its account of a daemon that does not answer
  if (!client.ok()) return client.status();
  return Check(invocation, (*client)->server(), invocation.timeout_s);
}

// Of several daemons the first that does not serve.
int PrintHealth(const Invocation& invocation) {
  std::string said;
  if (auto options = OptionsOf(invocation); IsMisuse(options.status())) return Fail(invocation, options.status());
  for (const Invocation& of_one : OfEachDaemon(invocation)) {
    const auto health = HealthOf(of_one);
    if (!health.ok()) return Fail(invocation, health.status());
    said = *health;
    if (said != kServing) break;
  }
  if (invocation.json) {
    google::protobuf::Struct answer;
    (*answer.mutable_fields())["status"].set_string_value(said);
    if (const int printed = PrintJson(invocation, answer); printed != kOk) return printed;
  } else {
    invocation.out << said << "\n";
  }
  return said == kServing ? kOk : kRefused;
}

}  // namespace

Command HealthCommand() {
  return {.name = "health",
          .arguments = {},
          .summary = "whether the daemon, or each of several, serves trainers (grpc.health.v1)",
          .details = "Exit code 0 when it says SERVING, for scripts and container probes.\n",
          .flags = {},
          .run = PrintHealth};
}

}  // namespace ballast::ctl
