// How even the parts of models are, of which tensors are never split: the table of deploy/README.md, "Several daemons".
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

#include "client/cpp/parts/part_placement.h"
#include "tests/model_shapes.h"

namespace ballast {
namespace {

constexpr uint32_t kDaemons[] = {2, 4, 8, 16, 32, 64};

struct Model {
  std::string name;
  std::vector<testing::Shape> shapes;
  uint64_t parameters;  // that it has
};

std::vector<Model> Models() {
  using testing::ShapesOf;
  return {
      {"all-MiniLM-L6-v2", testing::MiniLmShapes(), 22'565'376},
      {"Llama 3.1 8B", ShapesOf(testing::kLlama8B), 8'030'261'248},
      {"Llama 3.1 70B", ShapesOf(testing::kLlama70B), 70'553'706'496},
      {"Llama 3.1 405B", ShapesOf(testing::kLlama405B), 405'853'388'800},
      {"Qwen3-30B-A3B, each expert's matrices apart", ShapesOf(testing::kQwen3Moe), 30'532'122'624},
      {"the same, a layer's experts fused", ShapesOf(testing::kQwen3MoeFused), 30'532'122'624},
  };
}

uint64_t Sum(const std::vector<testing::Shape>& shapes) {
  uint64_t sum = 0;
  for (const testing::Shape& shape : shapes) sum += testing::Elements(shape);
  return sum;
}

// What the fullest daemon has to the mean.
double Fullest(const Model& model, uint32_t daemons) {
  v1::RunSpec spec;
  for (const testing::Shape& shape : model.shapes) {
    spec.add_tensors()->mutable_shape()->Add(shape.begin(), shape.end());
  }
  const PartPlacement placement = PartPlacement::Of(spec, daemons).value();
  uint64_t most = 0;
  for (uint32_t part = 0; part < daemons; ++part) {
    std::vector<testing::Shape> shapes;
    for (const uint32_t tensor : placement.numbers(part)) shapes.push_back(model.shapes[tensor]);
    most = std::max(most, Sum(shapes));
  }
  return static_cast<double>(most) * daemons / static_cast<double>(Sum(model.shapes));
}

double LargestOf(const Model& model) {
  uint64_t largest = 0;
  for (const testing::Shape& shape : model.shapes) largest = std::max(largest, testing::Elements(shape));
  return static_cast<double>(largest) / static_cast<double>(Sum(model.shapes));
}

std::string Table() {
  std::string table = "| model | its largest tensor |";
  std::string line = "| --- | --- |";
  for (const uint32_t daemons : kDaemons) {
    absl::StrAppend(
        &table, daemons == kDaemons[0] ? absl::StrCat(" ", daemons, " daemons |") : absl::StrCat(" ", daemons, " |"));
    absl::StrAppend(&line, " --- |");
  }
  absl::StrAppend(&table, "\n", line, "\n");
  for (const Model& model : Models()) {
    absl::StrAppend(&table, "| ", model.name, absl::StrFormat(" | %.1f %% |", 100 * LargestOf(model)));
    for (const uint32_t daemons : kDaemons)
      absl::StrAppend(&table, absl::StrFormat(" %.2f |", Fullest(model, daemons)));
    absl::StrAppend(&table, "\n");
  }
  return table;
}

// Else the table is of other models than it says.
TEST(PartBalanceTest, TheShapesAreOfAsManyParametersAsTheModels) {
  for (const Model& model : Models()) EXPECT_EQ(Sum(model.shapes), model.parameters) << model.name;
}

TEST(PartBalanceTest, TheDocumentsTable) {
  std::ifstream file(BALLAST_DEPLOY_README);
  std::ostringstream text;
  text << file.rdbuf();
  EXPECT_NE(text.str().find(Table()), std::string::npos) << "deploy/README.md, \"Several daemons\", is to have:\n"
                                                         << Table();
}

}  // namespace
}  // namespace ballast
