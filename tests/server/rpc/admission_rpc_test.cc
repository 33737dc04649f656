// Who may make which call: every method of both services, with every scope, on a run of the caller's and on another's.
#include <gmock/gmock.h>
#include <grpcpp/generic/generic_stub.h>
#include <gtest/gtest.h>

#include <map>

#include "absl/strings/str_cat.h"
#include "proto/tls/sha256.h"

#include "server/convert/canonical_spec.h"
#include "server/rpc/admission.h"
#include "tests/certificates.h"
#include "tests/server/captured_log.h"
#include "tests/server/rpc/rpc_fixture.h"

namespace ballast::testing {
namespace {

using google::protobuf::DescriptorPool;
using google::protobuf::MethodDescriptor;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr Scope kScopes[] = {Scope::kObserve, Scope::kPull, Scope::kPush, Scope::kAdmin};
constexpr char kOwn[] = "own-1", kOther[] = "other-1";

// The least scope that each method wants on the run, as the documents say it; none: any grant will do.
const std::map<std::string, std::optional<Scope>> kWanted = {
    {"GetServer", std::nullopt},    {"ListRuns", std::nullopt},
    {"GetRun", Scope::kObserve},    {"GetHistory", Scope::kObserve},
    {"Pull", Scope::kPull},         {"Subscribe", Scope::kPull},
    {"Plan", std::nullopt},         {"ListCheckpoints", Scope::kObserve},
    {"CreateRun", Scope::kPush},    {"AmendRun", Scope::kPush},
    {"Attach", Scope::kPush},       {"LoadState", Scope::kPush},
    {"Train", Scope::kPush},        {"Checkpoint", Scope::kPush},
    {"DeleteRun", Scope::kAdmin},   {"Rewind", Scope::kAdmin},
    {"Restore", Scope::kAdmin},     {"TagVersion", Scope::kPush},
    {"UntagVersion", Scope::kPush}, {"ListVersions", Scope::kPull},
};

std::vector<const MethodDescriptor*> Methods() {
  std::vector<const MethodDescriptor*> methods;
  for (const char* name : {"ballast.v1.TrainerService", "ballast.v1.AdminService", "ballast.v1.FollowService"}) {
    const auto* service = DescriptorPool::generated_pool()->FindServiceByName(name);
    for (int i = 0; i < service->method_count(); ++i) methods.push_back(service->method(i));
  }
  return methods;
}

class AdmissionRpcTest : public RpcTest {
 protected:
  void SetUp() override {
    std::string grants = "grants:\n";
    const auto add = [&](const std::string& name, const std::string& runs, absl::string_view scope) {
      absl::StrAppend(&grants, "- {name: ", name, ", token_sha256: ", Sha256Hex(TokenOf(name)), ", runs: ['", runs,
                      "'], scope: ", scope, "}\n");
    };
    for (const Scope scope : kScopes) add(std::string(ScopeName(scope)), "own-*", ScopeName(scope));
    add("operator", "*", "admin");
    Config config = DefaultConfig();
    config.access = files_.Write("access.yaml", grants, 0644);
    config.listen = absl::StrCat("unix:", files_.Path("grpc"));
    StartServer(config);
  }
  static std::string TokenOf(const std::string& name) { return absl::StrCat("ballast_", name, "-token"); }

  // The run, made anew, with a session of its own; the token of it.
  std::string MakeRun(const std::string& run_id) {
    {
      grpc::ClientContext context;
      Bring(TokenOf("operator"), &context);
      v1::DeleteRunRequest request;
      request.set_run_id(run_id);
      request.set_force(true);
      v1::DeleteRunResponse response;
      admin_->DeleteRun(&context, request, &response);
    }
    grpc::ClientContext creating, attaching;
    Bring(TokenOf("operator"), &creating);
    Bring(TokenOf("operator"), &attaching);
    const absl::Status created = CreateRun(SpecOf(run_id), &creating).status();
    EXPECT_TRUE(created.ok()) << created;
    v1::AttachRequest attach;
    attach.set_run_id(run_id);
    v1::AttachResponse attached;
    const grpc::Status t = Attach(attach, &attached, &attaching);
    EXPECT_TRUE(t.ok()) << t.error_message();
    return attached.session_token();
  }
  static v1::RunSpec SpecOf(const std::string& run_id) {
    v1::RunSpec spec = SmallSpec();
    spec.set_run_id(run_id);
    return spec;
  }

  // A request about the run, whichever way its message names one.
  static std::string RequestAbout(const MethodDescriptor& method, const std::string& run_id,
                                  const std::string& session) {
    google::protobuf::MessageFactory* factory = google::protobuf::MessageFactory::generated_factory();
    const std::unique_ptr<google::protobuf::Message> request(factory->GetPrototype(method.input_type())->New());
    const auto set = [&](google::protobuf::Message* in, const char* field, const std::string& text) {
      const auto* found = in->GetDescriptor()->FindFieldByName(field);
      if (found != nullptr) in->GetReflection()->SetString(in, found, text);
      return found != nullptr;
    };
    bool about = set(request.get(), "run_id", run_id);
    about |= set(request.get(), "session_token", session);
    for (const char* inner : {"spec", "open"}) {
      const auto* field = request->GetDescriptor()->FindFieldByName(inner);
      if (field == nullptr) continue;
      auto* message = request->GetReflection()->MutableMessage(request.get(), field);
      if (std::string(inner) == "spec") message->CopyFrom(SpecOf(run_id));
      about |= set(message, "run_id", run_id) || set(message, "session_token", session);
    }
    EXPECT_EQ(about, kWanted.at(method.name()).has_value() || method.name() == "Plan")
        << method.full_name() << " names no run";
    return request->SerializeAsString();
  }

  // The status of a call with one request, whatever kind of call it is.
  grpc::Status Call(const MethodDescriptor& method, const std::string& request, const std::string& grant) {
    grpc::TemplatedGenericStub<grpc::ByteBuffer, grpc::ByteBuffer> stub(channel_);
    grpc::ClientContext context;
    if (!grant.empty()) Bring(TokenOf(grant), &context);
    grpc::CompletionQueue queue;
    const auto wait = [&queue] {
      void* tag = nullptr;
      bool ok = false;
      return queue.Next(&tag, &ok) && ok;
    };
    const auto call =
        stub.PrepareCall(&context, absl::StrCat("/", method.service()->full_name(), "/", method.name()), &queue);
    call->StartCall(nullptr);
    wait();
    const grpc::Slice slice(request);
    call->WriteLast(grpc::ByteBuffer(&slice, 1), {}, nullptr);
    wait();
    grpc::ByteBuffer answer;
    do {
      call->Read(&answer, nullptr);
    } while (wait());
    grpc::Status status;
    call->Finish(&status, nullptr);
    wait();
    return status;
  }

  const TestCertificates files_;
};

TEST_F(AdmissionRpcTest, EveryMethodIsInTheTable) {
  for (const MethodDescriptor* method : Methods()) {
    ASSERT_TRUE(kWanted.contains(method->name())) << "say what " << method->full_name() << " wants";
    ASSERT_TRUE(NeedOf(method->name()).has_value()) << method->full_name() << " is not in admission.cc";
    EXPECT_EQ(NeedOf(method->name())->of_run, kWanted.at(method->name()).has_value());
  }
  EXPECT_EQ(Methods().size(), kWanted.size());
  EXPECT_FALSE(NeedOf("NoSuchMethod").has_value());
}

TEST_F(AdmissionRpcTest, EveryMethodWantsItsScopeOnTheRunItIsAbout) {
  for (const MethodDescriptor* method : Methods()) {
    const std::optional<Scope> wanted = kWanted.at(method->name());
    for (const char* run : {kOwn, kOther}) {
      for (const Scope scope : kScopes) {
        const std::string request = RequestAbout(*method, run, MakeRun(run));
        const grpc::Status status = Call(*method, request, std::string(ScopeName(scope)));
        const bool may = !wanted || (scope >= *wanted && run == kOwn);
        EXPECT_EQ(status.error_code() != grpc::StatusCode::PERMISSION_DENIED, may)
            << method->name() << " of " << run << " with " << ScopeName(scope) << ": " << status.error_message();
        EXPECT_NE(status.error_code(), grpc::StatusCode::UNAUTHENTICATED) << method->name();
      }
      const grpc::Status without = Call(*method, RequestAbout(*method, run, MakeRun(run)), "");
      EXPECT_EQ(without.error_code(), grpc::StatusCode::UNAUTHENTICATED) << method->name();
      const grpc::Status unknown = Call(*method, RequestAbout(*method, run, MakeRun(run)), "stranger");
      EXPECT_EQ(unknown.error_code(), grpc::StatusCode::UNAUTHENTICATED) << method->name();
    }
  }
}

TEST_F(AdmissionRpcTest, AStrangerIsToldSoBeforeItsSessionIsLookedFor) {
  for (const MethodDescriptor* method : Methods()) {
    const grpc::Status status = Call(*method, RequestAbout(*method, kOwn, "no session's"), "");
    EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAUTHENTICATED) << method->name();
  }
}

TEST_F(AdmissionRpcTest, ARefusalIsTheSameWhetherTheRunIsThereOrNot) {
  for (const MethodDescriptor* method : Methods()) {
    if (!kWanted.at(method->name()) || method->name() == "Train" || method->name() == "LoadState") continue;
    const std::string session = MakeRun(kOther);
    const std::string there = Call(*method, RequestAbout(*method, kOther, session), "admin").error_message();
    std::string gone = Call(*method, RequestAbout(*method, "other-2", session), "admin").error_message();
    EXPECT_THAT(gone, HasSubstr("'other-2'"));
    gone.replace(gone.find("other-2"), 7, kOther);
    EXPECT_EQ(there, gone) << method->name();
  }
}

TEST_F(AdmissionRpcTest, WhoAsksForARunThatIsNotThereIsNotToldOfOthers) {
  MakeRun(kOther);
  for (const MethodDescriptor* method : Methods()) {
    if (!kWanted.at(method->name())) continue;
    const grpc::Status status = Call(*method, RequestAbout(*method, "own-2", ""), "admin");
    EXPECT_THAT(status.error_message(), Not(HasSubstr(kOther))) << method->name();
  }
}

TEST_F(AdmissionRpcTest, ListRunsAnswersWithTheRunsThatTheCallerMaySee) {
  MakeRun(kOwn);
  MakeRun(kOther);
  const auto list = [&](const std::string& grant) {
    grpc::ClientContext context;
    Bring(TokenOf(grant), &context);
    v1::ListRunsResponse response;
    EXPECT_TRUE(admin_->ListRuns(&context, {}, &response).ok());
    std::vector<std::string> runs;
    for (const v1::RunStatus& run : response.runs()) runs.push_back(run.run_id());
    return runs;
  };
  EXPECT_THAT(list("observe"), ElementsAre(kOwn));
  EXPECT_THAT(list("operator"), ::testing::UnorderedElementsAre(kOwn, kOther));
}

TEST_F(AdmissionRpcTest, AnAdministratorsCallAndARefusalAreLoggedWithTheGrant) {
  const CapturedLog log;
  MakeRun(kOwn);
  const auto* remove = DescriptorPool::generated_pool()->FindMethodByName("ballast.v1.AdminService.DeleteRun");
  v1::DeleteRunRequest request;
  request.set_run_id(kOwn);
  request.set_force(true);
  Call(*remove, request.SerializeAsString(), "push");
  EXPECT_THAT(log.Await({"refused", "DeleteRun", "PERMISSION_DENIED"}),
              AllOf(HasSubstr(kOwn), Not(HasSubstr("-token"))));
  EXPECT_TRUE(Call(*remove, request.SerializeAsString(), "admin").ok());
  EXPECT_THAT(log.Await({"audit", "DeleteRun", "grant=admin"}), HasSubstr(kOwn));
}

}  // namespace
}  // namespace ballast::testing
