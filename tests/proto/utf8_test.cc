#include "proto/utf8.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "ballast/v1/run.pb.h"

namespace ballast {
namespace {

using ::testing::HasSubstr;

TEST(CheckTextTest, WhatIsUtf8Passes) {
  v1::RunSpec spec;
  spec.set_run_id("r");
  spec.add_tensors()->set_name("gr\xC3\xBC\xC3\x9F.\xE2\x82\xAC");
  (*spec.add_groups()->mutable_hyper())["lr"] = 1;
  EXPECT_TRUE(CheckText(spec).ok()) << CheckText(spec);
  EXPECT_TRUE(CheckText(v1::RunSpec()).ok());
}

TEST(CheckTextTest, TheFieldIsNamedAndItsBytesAreShown) {
  v1::RunSpec spec;
  spec.set_run_id("a\xFF");
  EXPECT_THAT(std::string(CheckText(spec).message()), HasSubstr("run_id is 'a\\xff', which is not valid UTF-8"));
  spec.set_run_id("a");
  spec.add_tensors()->set_name("w");
  spec.add_tensors()->set_name("\xED\xA0\x80");
  EXPECT_THAT(std::string(CheckText(spec).message()), HasSubstr("tensors[1].name is '\\xed\\xa0\\x80'"));
  spec.mutable_tensors()->RemoveLast();
  spec.add_groups()->set_rule("\xE2\x82");
  EXPECT_THAT(std::string(CheckText(spec).message()), HasSubstr("groups[0].rule is"));
}

}  // namespace
}  // namespace ballast
