#include "client/cpp/examples/idx_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <zlib.h>

#include <filesystem>
#include <fstream>

namespace ballast::examples {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

const std::string kLabels("\0\0\x08\1\0\0\0\3\7\2\xff", 11);

class IdxFileTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
    path_ = ::testing::TempDir() + "/idx_file_test." + test->name();
  }
  void TearDown() override { std::filesystem::remove(path_); }
  absl::StatusOr<IdxArray> Read(const std::string& content) {
    std::ofstream(path_, std::ios::binary) << content;
    return ReadIdx(path_);
  }
  std::string path_;
};

TEST_F(IdxFileTest, ReadsTheShapeAndTheBytes) {
  const auto labels = Read(kLabels);
  ASSERT_TRUE(labels.ok()) << labels.status();
  EXPECT_THAT(labels->shape, ElementsAre(3));
  EXPECT_THAT(labels->values, ElementsAre(7, 2, 255));
  const auto images = Read(std::string("\0\0\x08\3\0\0\0\1\0\0\0\2\0\0\0\1\5\6", 18));
  ASSERT_TRUE(images.ok()) << images.status();
  EXPECT_THAT(images->shape, ElementsAre(1, 2, 1));
  EXPECT_THAT(images->values, ElementsAre(5, 6));
}

TEST_F(IdxFileTest, ReadsWhatIsCompressed) {
  const gzFile file = gzopen(path_.c_str(), "wb");
  ASSERT_EQ(gzwrite(file, kLabels.data(), static_cast<unsigned>(kLabels.size())), static_cast<int>(kLabels.size()));
  ASSERT_EQ(gzclose(file), Z_OK);
  ASSERT_NE(std::filesystem::file_size(path_), kLabels.size());
  const auto labels = ReadIdx(path_);
  ASSERT_TRUE(labels.ok()) << labels.status();
  EXPECT_THAT(labels->values, ElementsAre(7, 2, 255));
}

TEST_F(IdxFileTest, AFileThatIsNotThereIsNamed) {
  EXPECT_EQ(ReadIdx(path_).status(), absl::NotFoundError(path_ + ": cannot be opened"));
}

TEST_F(IdxFileTest, DamagedFilesAreRefusedWithTheReason) {
  const std::pair<std::string, std::string> rows[] = {
      {"", "is no idx file"},
      {"PNG and more", "is no idx file"},
      {std::string("\0\0\x0d\1\0\0\0\0", 8), "holds elements of type 13; wanted: 8"},
      {std::string("\0\0\x08\0", 4), "has 0 dimensions"},
      {std::string("\0\0\x08\5", 4), "has 5 dimensions"},
      {std::string("\0\0\x08\1\0\0", 6), "ends within its dimensions"},
      {std::string("\0\0\x08\2\xff\xff\xff\xff\xff\xff\xff\xff", 12), "is larger than 1073741824 bytes"},
      {kLabels.substr(0, 10), "ends before the 3 bytes"},
      {kLabels + "x", "is longer than the 3 bytes"},
  };
  for (const auto& [content, says] : rows) {
    const absl::Status status = Read(content).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << says;
    EXPECT_THAT(std::string(status.message()), HasSubstr(path_ + ": " + says));
  }
}

}  // namespace
}  // namespace ballast::examples
