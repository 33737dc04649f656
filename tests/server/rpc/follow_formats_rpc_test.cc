// Readers that follow a run in other formats than it is served in: every version has the bits that Pull brings of its step
// from a run that serves them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <iterator>
#include <set>

#include "absl/strings/str_cat.h"

#include "tests/server/rpc/follow_fixture.h"

namespace ballast::testing {
namespace {

using ::testing::HasSubstr;

constexpr const char* kFormats[] = {"bf16", "fp16", "fp8-e4m3", "int8-row", "int8-tensor"};

class FollowFormatsRpcTest : public FollowRpcTest {
 protected:
  static v1::SubscribeRequest InFormat(const std::string& format) {
    v1::SubscribeRequest request = OfRun();
    request.set_format(format);
    return request;
  }
  // What the run is that has the same steps, and serves this format.
  static std::string TwinOf(const std::string& format) { return absl::StrCat("in-", format); }
  static v1::RunSpec InFormats(v1::RunSpec spec) {
    for (const char* format : kFormats) spec.mutable_follow()->add_formats(format);
    return spec;
  }
  std::map<std::string, Trainer> StartTwins() {
    std::map<std::string, Trainer> twins;
    for (const char* format : kFormats) {
      v1::RunSpec spec = Followed(format);
      spec.set_run_id(TwinOf(format));
      twins.emplace(format, StartTrainer(spec));
    }
    return twins;
  }
};

TEST_F(FollowFormatsRpcTest, AFormatIsWhatARunBringsThatServesIt) {
  Trainer t = StartTrainer(InFormats(Followed()));
  std::map<std::string, Trainer> twins = StartTwins();
  Reader served(follow_.get(), OfRun());
  std::map<std::string, std::unique_ptr<Reader>> readers;
  for (const char* format : kFormats) readers[format] = std::make_unique<Reader>(follow_.get(), InFormat(format));
  for (uint64_t step = 0; step <= 4; ++step) {
    if (step > 0) Step(&t, step, 1e-4);
    ASSERT_TRUE(served.AwaitStep(step));
    ExpectPulled(served);
    for (const auto& [format, reader] : readers) {
      SCOPED_TRACE(format);
      if (step > 0) Step(&twins.at(format), step, 1e-4);
      ASSERT_TRUE(reader->AwaitStep(step));
      ExpectPulled(*reader, std::nullopt, TwinOf(format));
    }
  }
  EXPECT_GT(readers["bf16"]->changed_chunks, 0u);
  const auto newest = [this](const std::string& format) {
    v1::ListVersionsRequest request;
    request.set_run_id("r1");
    request.set_format(format);
    v1::ListVersionsResponse answer;
    grpc::ClientContext context;
    EXPECT_TRUE(follow_->ListVersions(&context, request, &answer).ok()) << format;
    return answer.newest();
  };
  std::set<uint64_t> epochs = {newest("").epoch()};
  for (const auto& [format, reader] : readers) {
    EXPECT_EQ(newest(format).step(), 4u) << format;
    EXPECT_TRUE(epochs.insert(newest(format).epoch()).second) << format;
  }
  EXPECT_EQ(Status("r1").follow().readers(), 1 + std::size(kFormats));
}

TEST_F(FollowFormatsRpcTest, ReadersInOtherFormatsGoBackWithTheRun) {
  v1::RunSpec spec = InFormats(Followed());
  spec.mutable_rewind()->set_snapshots(2);
  spec.mutable_rewind()->set_every(2);
  Trainer t = StartTrainer(spec);
  std::map<std::string, std::unique_ptr<Reader>> readers;
  std::map<std::string, std::map<uint32_t, std::string>> then;
  for (const char* format : kFormats) readers[format] = std::make_unique<Reader>(follow_.get(), InFormat(format));
  for (uint64_t step = 1; step <= 5; ++step) {
    Step(&t, step);
    for (const auto& [format, reader] : readers) {
      ASSERT_TRUE(reader->AwaitStep(step));
      if (step == 2) then[format] = reader->weights;
    }
  }
  ASSERT_TRUE(RewindTo(2).ok());
  for (const auto& [format, reader] : readers) {
    EXPECT_NE(reader->weights, then[format]) << format;
    ASSERT_TRUE(reader->AwaitStep(2, 2)) << format;
    EXPECT_EQ(reader->weights, then[format]) << format;
  }
}

TEST_F(FollowFormatsRpcTest, AFormatThatAllTensorsAreServedInIsAsServed) {
  v1::RunSpec spec = SmallSpec();
  spec.mutable_groups(0)->set_serving("bf16");
  spec.mutable_follow();
  const uint64_t before = CreateRun(spec)->plan().server().following();
  spec.set_run_id("r2");
  spec.mutable_follow()->add_formats("bf16");
  EXPECT_EQ(CreateRun(spec)->plan().server().following(), before);
  spec.set_run_id("r3");
  spec.mutable_follow()->add_formats("fp8-e4m3");
  EXPECT_GT(CreateRun(spec)->plan().server().following(), before);
  server_.reset();
  SetUp();
  Trainer t = StartTrainer(Followed("bf16"));
  Reader reader(follow_.get(), InFormat("bf16")), served(follow_.get(), OfRun());
  Step(&t, 1);
  for (Reader* one : {&reader, &served}) {
    ASSERT_TRUE(one->AwaitStep(1));
    ExpectPulled(*one);
  }
}

TEST_F(FollowFormatsRpcTest, FormatsThatCannotBeFollowedAreRefusedByName) {
  const auto refusal = [&](const std::vector<std::string>& formats) {
    v1::RunSpec spec = Followed();
    for (const std::string& format : formats) spec.mutable_follow()->add_formats(format);
    return std::string(CreateRun(spec).status().message());
  };
  EXPECT_THAT(refusal({"bf16", "bf17"}), HasSubstr("follow.formats[1] is 'bf17'; valid: fp32, bf16"));
  EXPECT_THAT(refusal({"fp8-e5m2"}), HasSubstr("follow.formats[0] is 'fp8-e5m2'; valid:"));
  EXPECT_THAT(refusal({"bf16", "bf16"}), HasSubstr("follow.formats[1] is 'bf16', which is there twice"));
  v1::RunSpec spec = Followed();
  for (const char* format : {"fp16", "bf16"}) spec.mutable_follow()->add_formats(format);
  spec.add_averages(0.9);
  spec.mutable_follow()->set_averages(true);
  Trainer t = StartTrainer(spec);
  const grpc::Status unlisted = Refusal(InFormat("fp8-e4m3"));
  EXPECT_EQ(unlisted.error_code(), grpc::FAILED_PRECONDITION);
  EXPECT_THAT(unlisted.error_message(), HasSubstr("in format 'fp8-e4m3': readers may follow it as it is served, or in "
                                                  "fp16, bf16; create it with that in follow.formats"));
  EXPECT_EQ(Refusal(InFormat("bf17")).error_code(), grpc::INVALID_ARGUMENT);
  v1::SubscribeRequest both = OfAverage(0.9), alone = InFormat("bf16");
  both.set_format("bf16");
  EXPECT_THAT(Refusal(both).error_message(), HasSubstr("an average is followed as the weights are served"));
  alone.mutable_version()->set_tag("good");
  EXPECT_EQ(Refusal(alone).error_code(), grpc::INVALID_ARGUMENT);
}

}  // namespace
}  // namespace ballast::testing
