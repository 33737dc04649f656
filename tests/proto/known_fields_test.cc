#include "proto/known_fields.h"

#include <gmock/gmock.h>
#include <google/protobuf/unknown_field_set.h>
#include <gtest/gtest.h>

#include <string>

#include "ballast/v1/trainer.pb.h"

namespace ballast {
namespace {

using ::testing::HasSubstr;

v1::CreateRunRequest Known() {
  v1::CreateRunRequest request;
  request.mutable_spec()->set_run_id("r");
  request.mutable_spec()->add_tensors()->set_name("w");
  request.mutable_spec()->add_tensors()->add_shape(3);
  (*request.mutable_spec()->add_groups()->mutable_hyper())["lr"] = 1;
  request.mutable_spec()->mutable_follow()->set_every(2);
  return request;
}

void AddTo(google::protobuf::Message* message, int number) {
  message->GetReflection()->MutableUnknownFields(message)->AddVarint(number, 1);
}

TEST(KnownFieldsTest, WhatIsKnownPasses) {
  EXPECT_EQ(UnknownFieldOf(Known()), std::nullopt);
  EXPECT_TRUE(CheckKnownFields(Known()).ok());
}

TEST(KnownFieldsTest, TheFirstUnknownFieldIsNamed) {
  v1::CreateRunRequest request = Known();
  AddTo(request.mutable_spec()->mutable_follow(), 99);
  EXPECT_EQ(UnknownFieldOf(request), "spec.follow.99");
  AddTo(request.mutable_spec()->mutable_tensors(1), 98);
  EXPECT_EQ(UnknownFieldOf(request), "spec.tensors[1].98");
  AddTo(&request, 97);
  EXPECT_EQ(UnknownFieldOf(request), "97");
}

TEST(KnownFieldsTest, TheRefusalSaysWhatToDo) {
  v1::CreateRunRequest request = Known();
  AddTo(request.mutable_spec(), 99);
  const absl::Status refused = CheckKnownFields(request);
  EXPECT_TRUE(absl::IsInvalidArgument(refused));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("the field spec.99 of CreateRunRequest"));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("Install that version of the daemon"));
}

}  // namespace
}  // namespace ballast
