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

TEST(CharacterTest, ItsCodePointIsRead) {
  EXPECT_EQ(CodePointOf("a"), U'a');
  EXPECT_EQ(CodePointOf("\u00e9"), U'\u00e9');
  EXPECT_EQ(CodePointOf("\u20ac"), U'\u20ac');
  EXPECT_EQ(CodePointOf("\U0010FFFF"), U'\U0010FFFF');
}

TEST(CharacterTest, JsonHasAnyCharacter) {
  EXPECT_EQ(JsonEscape(U'\n'), "\\n");
  EXPECT_EQ(JsonEscape(U'\x1b'), "\\u001b");
  EXPECT_EQ(JsonEscape(U'\u202e'), "\\u202e");
  EXPECT_EQ(JsonEscape(U'\U000E0041'), "\\udb40\\udc41");
}

TEST(CharacterTest, WhatIsObeyedInsteadOfShownIsUnseen) {
  for (const char32_t code_point : U"\x1b\x7f\u0085\u009b\u061c\u200b\u200f\u2028\u202e\u2069\ufeff\U000E0001") {
    EXPECT_TRUE(IsUnseen(code_point)) << static_cast<uint32_t>(code_point);
  }
  for (const char32_t code_point : {U'a', U' ', U'~', U'\u00e9', U'\u20ac', U'\u202f', U'\u6a21', U'\U0001F600'}) {
    EXPECT_FALSE(IsUnseen(code_point)) << static_cast<uint32_t>(code_point);
  }
}

}  // namespace
}  // namespace ballast
