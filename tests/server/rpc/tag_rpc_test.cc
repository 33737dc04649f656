// Versions of a run in training that have names: read to the bit by Pull and Subscribe, whatever becomes of the run.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"

#include "tests/server/captured_log.h"
#include "tests/server/rpc/tag_fixture.h"

namespace ballast::testing {
namespace {

using ::testing::HasSubstr;

class TagRpcTest : public TagFixture {
 protected:
  grpc::Status Tag(const std::string& name, v1::TagVersionResponse* response = nullptr, bool replace = false,
                   std::optional<uint64_t> step = {}) {
    v1::TagVersionRequest request;
    request.set_run_id("r1");
    request.set_name(name);
    request.set_replace(replace);
    if (step) request.mutable_version()->mutable_id()->set_step(*step);
    v1::TagVersionResponse answer;
    grpc::ClientContext context;
    return follow_->TagVersion(&context, request, response == nullptr ? &answer : response);
  }
  grpc::Status Untag(const std::string& name, const std::string& run = "r1") {
    v1::UntagVersionRequest request;
    request.set_run_id(run);
    request.set_name(name);
    v1::UntagVersionResponse answer;
    grpc::ClientContext context;
    return follow_->UntagVersion(&context, request, &answer);
  }
  static v1::PullRequest PullOf(const std::string& tag) {
    v1::PullRequest request;
    request.set_run_id("r1");
    if (!tag.empty()) request.mutable_version()->set_tag(tag);
    return request;
  }
  grpc::Status Pull(const v1::PullRequest& request, StepAnswer* answer) {
    grpc::ClientContext context;
    const auto pull = trainer_->Pull(&context, request);
    v1::Weights w;
    while (pull->Read(&w)) {
      for (const v1::Weights& one : w.batch()) Take(one, answer);
      if (w.batch().empty()) Take(w, answer);
    }
    EXPECT_TRUE(answer->checksums_right);
    return pull->Finish();
  }
  StepAnswer Pulled(const std::string& tag) {
    StepAnswer answer;
    v1::PullRequest request = PullOf(tag);
    request.set_takes_batches(!tag.empty() && tag.size() % 2 == 0);
    const grpc::Status s = Pull(request, &answer);
    EXPECT_TRUE(s.ok()) << tag << ": " << s.error_message();
    return answer;
  }
  // What Subscribe brings of it, whole.
  StepAnswer Subscribed(const std::string& tag) {
    v1::SubscribeRequest request;
    request.set_run_id("r1");
    request.mutable_version()->set_tag(tag);
    grpc::ClientContext context;
    const auto call = follow_->Subscribe(&context, request);
    StepAnswer answer;
    v1::VersionPart read;
    while (call->Read(&read)) {
      for (const v1::VersionPart& part : read.batch()) {
        if (!part.has_chunk()) continue;
        const v1::ChangedChunk& chunk = part.chunk();
        answer.weights[chunk.tensor()] += chunk.values();
        auto& scales = answer.scales[chunk.tensor()];
        scales.insert(scales.end(), chunk.scales().begin(), chunk.scales().end());
      }
    }
    const grpc::Status s = call->Finish();
    EXPECT_TRUE(s.ok()) << s.error_message();
    return answer;
  }
  // Both bring this.
  void ExpectIs(const std::string& tag, const StepAnswer& then) {
    const StepAnswer pulled = Pulled(tag), subscribed = Subscribed(tag);
    EXPECT_EQ(pulled.weights, then.weights) << tag;
    EXPECT_EQ(pulled.scales, then.scales) << tag;
    EXPECT_EQ(subscribed.weights, then.weights) << tag;
    for (const auto& [tensor, scales] : then.scales) EXPECT_EQ(subscribed.scales.at(tensor), scales) << tag;
  }
  grpc::Status Delete(bool keep) {
    v1::DeleteRunRequest request;
    request.set_run_id("r1");
    request.set_force(true);
    request.set_keep_checkpoints(keep);
    grpc::ClientContext context;
    v1::DeleteRunResponse response;
    return admin_->DeleteRun(&context, request, &response);
  }

  CapturedLog log_;
};

TEST_F(TagRpcTest, ANameIsOfTheLastClosedStepAndStays) {
  for (const bool storage : {false, true}) {
    for (const char* serving : {"", "bf16", "int8-row"}) {
      SCOPED_TRACE(absl::StrCat(serving, storage ? ", on the disk" : ", in memory"));
      storage ? StartWithStorage() : Start(DefaultConfig());
      Trainer t = StartTrainer(Tagged(serving));
      Step(&t, 1);
      const StepAnswer then = Pulled("");
      v1::TagVersionResponse tagged;
      const grpc::Status s = Tag("good", &tagged);
      ASSERT_TRUE(s.ok()) << s.error_message();
      EXPECT_TRUE(tagged.created());
      EXPECT_EQ(tagged.tag().id().step(), 1u);
      EXPECT_EQ(tagged.tag().file().empty(), !storage);
      log_.Await({"audit", "tag=good"});
      for (uint64_t step = 2; step <= 4; ++step) Step(&t, step);
      ASSERT_TRUE(Tag("later").ok());
      ExpectIs("good", then);
      ExpectIs("later", Pulled(""));
      const v1::ListVersionsResponse versions = Versions();
      ASSERT_EQ(versions.tags_size(), 2);
      EXPECT_EQ(versions.tags(0).name(), "good");
      EXPECT_EQ(versions.tags(1).id().step(), 4u);
      EXPECT_EQ(Status("r1").follow().tags(), 2u);
      const v1::RunStatus status = Status("r1");
      EXPECT_EQ(status.bytes().SerializeAsString(), status.plan().server().SerializeAsString());
      ASSERT_TRUE(Untag("good").ok());
      EXPECT_THAT(Refused(Untag("good"), grpc::NOT_FOUND), HasSubstr("names: 'later' (step 4)"));
      ASSERT_TRUE(Delete(false).ok());
      EXPECT_FALSE(std::filesystem::exists(folder_.path() + "/runs/r1"));
    }
  }
}

TEST_F(TagRpcTest, APullOfOneLeavesOutWhatTheReaderHas) {
  Trainer t = StartTrainer(Tagged());
  Step(&t, 1);
  ASSERT_TRUE(Tag("good").ok());
  const StepAnswer then = Pulled("good");
  v1::PullRequest request = PullOf("good");
  request.add_tensors(2);
  request.add_tensors(1);
  for (const uint32_t i : {2, 1}) {
    const std::string& codes = then.weights.at(i);
    request.add_digests(WeightDigest(Bytes(codes)) + (i == 1 ? 1 : 0));
  }
  StepAnswer answer;
  ASSERT_TRUE(Pull(request, &answer).ok());
  ASSERT_EQ(answer.weights.size(), 1u);
  EXPECT_EQ(answer.weights.at(1), then.weights.at(1));
  EXPECT_EQ(answer.labels.at(1), 1u);
}

TEST_F(TagRpcTest, ANewDaemonHasThoseOnTheDisk) {
  StartWithStorage();
  Trainer t = StartTrainer(Tagged("int8-row"));
  Step(&t, 1);
  const StepAnswer then = Pulled("");
  ASSERT_TRUE(Tag("good").ok());
  Step(&t, 2);
  const v1::TaggedVersion before = Versions().tags(0);
  StartAnew(&t);
  ASSERT_EQ(Versions().tags_size(), 1);
  EXPECT_EQ(Versions().tags(0).SerializeAsString(), before.SerializeAsString());
  ExpectIs("good", then);
  ASSERT_TRUE(Delete(/*keep=*/true).ok());
  EXPECT_TRUE(std::filesystem::exists(before.file())) << "as checkpoints stay";
}

TEST_F(TagRpcTest, RewindsAndReplacedWeightsLeaveIt) {
  v1::RunSpec spec = Tagged();
  spec.mutable_rewind()->set_snapshots(2);
  spec.mutable_rewind()->set_every(1);
  Trainer t = StartTrainer(spec);
  for (uint64_t step = 1; step <= 3; ++step) Step(&t, step);
  const StepAnswer then = Pulled("");
  ASSERT_TRUE(Tag("three").ok());
  ASSERT_TRUE(RewindTo(2).ok());
  ASSERT_TRUE(Tag("two-again").ok());
  EXPECT_EQ(Versions().tags(1).id().generation(), 2u);
  ExpectIs("three", then);
  ExpectIs("two-again", Pulled(""));
  v1::AttachResponse attached = AttachFresh("r1");
  grpc::ClientContext context;
  v1::LoadStateResponse response;
  const auto load = trainer_->LoadState(&context, &response);
  const std::vector<float> values(t.spec.tensors[1].elements, 0.25f);
  for (uint64_t k = 0; k < ChunkCount(t.spec, t.spec.tensors[1]); ++k) {
    v1::LoadStateRequest request = LoadRequest(t.spec, attached.session_token(), 1, k, values);
    request.set_replace(true);
    ASSERT_TRUE(load->Write(request));
  }
  load->WritesDone();
  const grpc::Status loaded = load->Finish();
  ASSERT_TRUE(loaded.ok()) << loaded.error_message();
  ExpectIs("three", then);
}

TEST_F(TagRpcTest, AnAmendmentKeepsThoseOnTheDiskAndIsRefusedForThoseInMemory) {
  v1::RunSpec spec = Tagged();
  Trainer t = StartTrainer(spec);
  Step(&t, 1);
  ASSERT_TRUE(Tag("good").ok());
  v1::RunSpec more = spec;
  more.mutable_follow()->set_tags(9);
  EXPECT_THAT(Refused(Amend(t.token, more), grpc::FAILED_PRECONDITION), HasSubstr("1 versions with names in memory"));
  EXPECT_EQ(Pulled("good").weights.size(), 3u);

  StartWithStorage();
  t = StartTrainer(spec);
  Step(&t, 1);
  const StepAnswer then = Pulled("");
  ASSERT_TRUE(Tag("good").ok());
  ASSERT_TRUE(Amend(t.token, more).ok());
  EXPECT_EQ(Versions().most_tags(), 9u);
  ExpectIs("good", then);
  const v1::AttachResponse attached = AttachFresh("r1");
  v1::TensorSpec* const added = more.add_tensors();
  added->set_name("added");
  added->add_shape(8);
  added->set_dtype("bf16");
  ASSERT_TRUE(Amend(attached.session_token(), more).ok());
  ASSERT_EQ(Versions().tags_size(), 1);
  EXPECT_THAT(Versions().tags(0).unreadable(), HasSubstr("is of another spec"));
  StepAnswer answer;
  EXPECT_THAT(Refused(Pull(PullOf("good"), &answer), grpc::FAILED_PRECONDITION), HasSubstr("any safetensors reader"));
}

TEST_F(TagRpcTest, RefusesByName) {
  EXPECT_THAT(Refused(Tag("good"), grpc::NOT_FOUND), HasSubstr("r1"));
  EXPECT_EQ(Untag("good").error_code(), grpc::NOT_FOUND);
  Trainer t = StartTrainer(Tagged("", 1));
  for (const char* name : {"", "A", "a/b", "../x", "a."}) {
    EXPECT_THAT(Refused(Tag(name), grpc::INVALID_ARGUMENT), HasSubstr("wanted 1 to 64 of a-z"));
  }
  Step(&t, 1);
  ASSERT_TRUE(Tag("good").ok());
  ASSERT_TRUE(Tag("good").ok());
  Step(&t, 2);
  EXPECT_THAT(Refused(Tag("good"), grpc::ALREADY_EXISTS), HasSubstr("with replace"));
  ASSERT_TRUE(Tag("good", nullptr, /*replace=*/true).ok());
  EXPECT_THAT(Refused(Tag("more"), grpc::RESOURCE_EXHAUSTED), HasSubstr("allows 1 (follow.tags)"));
  EXPECT_THAT(Refused(Tag("good", nullptr, true, 1), grpc::NOT_FOUND),
              HasSubstr("has no version of step 1: the newest is of step 2"));
  StepAnswer answer;
  EXPECT_THAT(Refused(Pull(PullOf("bad"), &answer), grpc::NOT_FOUND), HasSubstr("names: 'good' (step 2)"));
  v1::PullRequest both = PullOf("good");
  both.set_step(1);
  EXPECT_THAT(Refused(Pull(both, &answer), grpc::INVALID_ARGUMENT), HasSubstr("leave out `step`"));
  both = PullOf("good");
  both.set_average(0.5);
  EXPECT_THAT(Refused(Pull(both, &answer), grpc::INVALID_ARGUMENT), HasSubstr("`average`, or version"));
  both = PullOf("good");
  both.add_tensors(7);
  EXPECT_THAT(Refused(Pull(both, &answer), grpc::INVALID_ARGUMENT), HasSubstr("tensor 7: run 'r1' has 3"));
  both = PullOf("good");
  both.add_digests(1);
  EXPECT_THAT(Refused(Pull(both, &answer), grpc::INVALID_ARGUMENT), HasSubstr("1 digests for 3 tensors"));
  both = PullOf("");
  both.mutable_version();
  EXPECT_THAT(Refused(Pull(both, &answer), grpc::INVALID_ARGUMENT), HasSubstr("neither a tag nor an id"));
  v1::SubscribeRequest request;
  request.set_run_id("r1");
  request.set_every(3);
  request.mutable_version()->set_tag("good");
  grpc::ClientContext context;
  EXPECT_THAT(Refused(follow_->Subscribe(&context, request)->Finish(), grpc::INVALID_ARGUMENT), HasSubstr("`every`"));
  v1::RunSpec spec = Tagged("", 300);
  spec.set_run_id("r2");
  EXPECT_THAT(std::string(CreateRun(spec).status().message()), HasSubstr("follow.tags is 300; wanted: at most 256"));
}

TEST_F(TagRpcTest, ARunWithoutFollowOrWeightsSaysSo) {
  StartTrainer(SmallSpec());
  EXPECT_THAT(Refused(Tag("good"), grpc::FAILED_PRECONDITION), HasSubstr("RunSpec.follow"));
  StepAnswer answer;
  EXPECT_THAT(Refused(Pull(PullOf("good"), &answer), grpc::FAILED_PRECONDITION), HasSubstr("RunSpec.follow"));
  ASSERT_TRUE(Delete(false).ok());
  ASSERT_TRUE(CreateRun(Tagged()).ok());
  EXPECT_THAT(Refused(Tag("good"), grpc::FAILED_PRECONDITION), HasSubstr("has no weights yet"));
}

TEST_F(TagRpcTest, ADamagedFileIsNotSent) {
  StartWithStorage();
  Trainer t = StartTrainer(Tagged());
  Step(&t, 1);
  ASSERT_TRUE(Tag("good").ok());
  const std::string file = Versions().tags(0).file();
  {
    std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
    stream.seekp(-1, std::ios::end);
    stream.put('\x55');
    stream.seekp(-2, std::ios::end);
    stream.put('\x55');
  }
  StepAnswer answer;
  EXPECT_THAT(Refused(Pull(PullOf("good"), &answer), grpc::DATA_LOSS), HasSubstr("is damaged"));
  Step(&t, 2);
}

}  // namespace
}  // namespace ballast::testing
