// What a caller may have of the daemon, and what becomes of one that is refused: counted by grant, or by address where
// there is no access file.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "proto/tls/sha256.h"

#include "server/plan/plan.h"
#include "tests/certificates.h"
#include "tests/eventually.h"
#include "tests/server/captured_log.h"
#include "tests/server/rpc/rpc_fixture.h"

namespace ballast::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

v1::RunSpec Named(const std::string& run_id) {
  v1::RunSpec spec = SmallSpec();
  spec.set_run_id(run_id);
  return spec;
}

class QuotaRpcTest : public RpcTest {
 protected:
  // A daemon at a Unix socket with a grant for each of these: team-a's and team-b's tokens, with what team-a may have.
  void StartWithGrants(const std::string& quota) {
    Config config = DefaultConfig();
    config.access = files_.Write("access.yaml",
                                 absl::StrCat("grants:\n", GrantText("team-a", quota), GrantText("team-b", ""),
                                              GrantText("team-a-new", quota, "team-a-*")),
                                 0644);
    config.listen = absl::StrCat("unix:", files_.Path("grpc"));
    StartServer(config);
  }
  static std::string GrantText(const std::string& name, const std::string& quota, std::string runs = "") {
    if (runs.empty()) runs = absl::StrCat(name, "-*");
    return absl::StrCat("- {name: ", name, ", token_sha256: ", Sha256Hex(name), ", runs: ['", runs, "'], scope: admin",
                        quota, "}\n");
  }
  static uint64_t BytesOf(const v1::RunSpec& spec) {
    return MakePlan(ToRunSpec(spec, DefaultConfig().limits).value()).bytes.total();
  }
  absl::Status Create(const std::string& run_id, const std::string& token) {
    grpc::ClientContext context;
    if (!token.empty()) Bring(token, &context);
    const absl::Status created = CreateRun(Named(run_id), &context).status();
    const auto stated = context.GetServerTrailingMetadata().find("ballast-retry-after-ms");
    retry_after_ = stated == context.GetServerTrailingMetadata().end()
                       ? ""
                       : std::string(stated->second.data(), stated->second.size());
    return created;
  }
  absl::Status Delete(const std::string& run_id, const std::string& token) {
    grpc::ClientContext context;
    if (!token.empty()) Bring(token, &context);
    v1::DeleteRunRequest request;
    request.set_run_id(run_id);
    v1::DeleteRunResponse response;
    return FromGrpc(admin_->DeleteRun(&context, request, &response));
  }
  static absl::Status FromGrpc(const grpc::Status& s) {
    return absl::Status(static_cast<absl::StatusCode>(s.error_code()), s.error_message());
  }
  // Of ballast_quota_refused_total; cut out, so that a failure does not print all metrics.
  std::string Refusals(const char* reason) const {
    const std::string all = metrics_.Serialize(), name = absl::StrCat("quota_refused_total{reason=\"", reason, "\"} ");
    const size_t at = all.find(name) + name.size();
    return all.substr(at, all.find('\n', at) - at);
  }
  absl::Status List(const std::string& token) {
    grpc::ClientContext context;
    if (!token.empty()) Bring(token, &context);
    v1::ListRunsResponse response;
    return FromGrpc(admin_->ListRuns(&context, {}, &response));
  }
  // A session of a new run of team-a's.
  std::string MakeSession(const std::string& run_id) {
    EXPECT_TRUE(Create(run_id, "team-a").ok());
    grpc::ClientContext context;
    Bring("team-a", &context);
    v1::AttachRequest request;
    request.set_run_id(run_id);
    v1::AttachResponse response;
    EXPECT_TRUE(Attach(request, &response, &context).ok());
    return response.session_token();
  }
  // A Train stream of team-a's, which has sent its Open.
  class TrainCall {
   public:
    TrainCall(v1::TrainerService::Stub* stub, const std::string& session) {
      Bring("team-a", &context_);
      stream_ = stub->Train(&context_);
      v1::TrainRequest request;
      request.mutable_open()->set_session_token(session);
      v1::TrainResponse response;
      opened_ = stream_->Write(request) && stream_->Read(&response);
    }
    ~TrainCall() {
      if (stream_ != nullptr) End();
    }
    bool opened() const { return opened_; }
    grpc::Status End() {
      if (opened_) context_.TryCancel();
      const grpc::Status status = stream_->Finish();
      stream_ = nullptr;
      return status;
    }
    size_t RetryAfters() const { return context_.GetServerTrailingMetadata().count("ballast-retry-after-ms"); }

   private:
    grpc::ClientContext context_;
    std::unique_ptr<grpc::ClientReaderWriter<v1::TrainRequest, v1::TrainResponse>> stream_;
    bool opened_ = false;
  };

  const TestCertificates files_;
  std::string retry_after_;  // of the last Create
};

TEST_F(QuotaRpcTest, RunsAreCountedByTheNamesThatAGrantCovers) {
  StartWithGrants(", most_runs: 2");
  EXPECT_TRUE(Create("team-a-1", "team-a").ok());
  EXPECT_TRUE(Create("team-a-2", "team-a").ok());
  EXPECT_TRUE(Create("team-a-2", "team-a").ok()) << "it is there: nothing is made";
  const absl::Status refused = Create("team-a-3", "team-a");
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()),
              AllOf(HasSubstr("one more than the 2 runs that grant team-a may have (most_runs of grant team-a)"),
                    HasSubstr("it has 2: team-a-1, team-a-2")));
  EXPECT_EQ(retry_after_, "") << "waiting does not help";
  EXPECT_TRUE(absl::IsResourceExhausted(Create("team-a-3", "team-a-new"))) << "a second token is no second quota";
  EXPECT_TRUE(Create("team-b-1", "team-b").ok());
  EXPECT_TRUE(Delete("team-a-1", "team-a").ok());
  EXPECT_TRUE(Create("team-a-3", "team-a").ok());
  EXPECT_EQ(Refusals("runs"), "2");
}

TEST_F(QuotaRpcTest, BytesAreThoseOfTheRunsPlans) {
  const uint64_t bytes = BytesOf(SmallSpec());
  StartWithGrants(absl::StrCat(", most_bytes: ", 2 * bytes));
  EXPECT_TRUE(Create("team-a-1", "team-a").ok());
  EXPECT_TRUE(Create("team-a-2", "team-a").ok());
  const absl::Status refused = Create("team-a-3", "team-a");
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr(absl::StrCat("needs ", bytes, " bytes, and grant team-a uses ", 2 * bytes, " of the ",
                                     2 * bytes, " that it may (most_bytes of grant team-a)")));
  EXPECT_EQ(retry_after_, "");
  EXPECT_TRUE(Create("team-b-2", "team-b").ok()) << "another's bytes are its own";
  EXPECT_EQ(Refusals("bytes"), "1");
}

TEST_F(QuotaRpcTest, ARunDoesNotGrowBeyondTheQuotaByBeingAmended) {
  v1::RunSpec more = SmallSpec();
  *more.add_tensors() = MakeSpec("r1", {{"layers.1.w", {1000, 1000}}}).tensors(0);
  Config config = DefaultConfig();
  config.limits.caller_bytes = BytesOf(more) - 1;
  StartServer(config);
  Trainer trainer = StartTrainer(SmallSpec());
  ExpectSteps(&trainer, 1, 1);
  const grpc::Status refused = Amend(trainer.token, more);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(refused.error_message(), HasSubstr("that it may (limits.caller_bytes)"));
  ExpectSteps(&trainer, 2, 2);
}

TEST_F(QuotaRpcTest, StreamsAreCountedAndARefusalSaysWhenToAskAgain) {
  StartWithGrants(", most_streams: 1");
  const std::string first_session = MakeSession("team-a-1"), second_session = MakeSession("team-a-2");
  TrainCall first(trainer_.get(), first_session);
  EXPECT_TRUE(first.opened());
  TrainCall second(trainer_.get(), second_session);
  EXPECT_FALSE(second.opened());
  const grpc::Status refused = second.End();
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED) << refused.error_message();
  EXPECT_THAT(refused.error_message(), HasSubstr("may have 1 streams open (most_streams of grant team-a), and has 1"));
  EXPECT_EQ(second.RetryAfters(), 1u);
  first.End();
  // The place is free when the daemon has heard of the end.
  EXPECT_TRUE(Soon([&] { return TrainCall(trainer_.get(), second_session).opened(); }));
  EXPECT_NE(Refusals("streams"), "0");
}

TEST_F(QuotaRpcTest, CallsASecondAreLimitedAndOthersAreNot) {
  StartWithGrants(", most_requests: 1");
  absl::Status last;
  for (int i = 0; i < 1000 && last.ok(); ++i) last = List("team-a");
  EXPECT_TRUE(absl::IsResourceExhausted(last)) << last;
  EXPECT_THAT(std::string(last.message()), HasSubstr("more than the 1 calls a second that it may"));
  ASSERT_TRUE(Soon([&] { return !Create("team-a-1", "team-a").ok(); }));  // a call's right may have grown meanwhile
  EXPECT_THAT(retry_after_, AllOf(Not(""), Not("0")));
  EXPECT_TRUE(List("team-b").ok());
  EXPECT_NE(Refusals("requests"), "0");
}

TEST_F(QuotaRpcTest, WithoutAnAccessFileAnAddressIsACaller) {
  Config config = DefaultConfig();
  config.limits.caller_runs = 1;
  StartServer(config);
  EXPECT_TRUE(Create("a", "").ok());
  const absl::Status refused = Create("b", "");
  EXPECT_THAT(std::string(refused.message()), HasSubstr("that address 127.0.0.1 may have (limits.caller_runs)"));
  EXPECT_TRUE(Delete("a", "").ok());
  EXPECT_TRUE(Create("b", "").ok());
}

TEST_F(QuotaRpcTest, WhoseCreateRunsFailIsRefusedBeforeItsSpecIsLookedAtAndMayDoAllElse) {
  Config config = DefaultConfig();
  config.limits.caller_failures = 5;
  StartServer(config);
  ASSERT_TRUE(Create("good", "").ok());
  const auto create_bad = [&] { return CreateRun(v1::RunSpec()).status(); };
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(absl::IsInvalidArgument(create_bad())) << i;
  const CapturedLog log;
  const absl::Status refused = create_bad();
  EXPECT_TRUE(absl::IsResourceExhausted(refused));
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("CreateRun of address 127.0.0.1 failed more than 5 times in a minute (limits.caller_failures), "
                        "the last with INVALID_ARGUMENT"));
  EXPECT_TRUE(absl::IsResourceExhausted(Create("other", "")));
  EXPECT_NE(retry_after_, "");
  EXPECT_TRUE(List("").ok());
  EXPECT_NE(log.Await({"quota", "reason=failures", "address 127.0.0.1"}), "");
  EXPECT_EQ(log.Count({"refused: a request was refused"}), 0u) << "the lines of others would not be shown";
}

}  // namespace
}  // namespace ballast::testing
