// What a crash, or somebody else, has left in a journal's folder: files of frames whose checksums are right, with any
// records in them, cut and flipped anywhere. What is accepted stays in bounds, comes in the order of its steps and has the
// sizes that the run's spec says; what is refused says why.
//
// An input is a program: each byte says what to append to the file in hand, or what to do to it, and bytes behind it with
// what. A libFuzzer target (LLVMFuzzerTestOneInput); random_inputs.cc drives it where there is no clang.
#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

#include "server/run/journal_replay.h"
#include "server/storage/journal_files.h"
#include "tests/fuzz/input.h"
#include "tests/fuzz/require.h"
#include "tests/server/storage/model_fs.h"

namespace ballast::fuzz {
namespace {

constexpr char kFolder[] = "/r/journal";
constexpr uint64_t kBase = 7, kBaseStep = 3;
constexpr uint32_t kTensors = 2;
constexpr size_t kMostFiles = 4, kMostStream = 1 << 16;

RunSpec Spec() {
  RunSpec spec{.run_id = "r"};
  spec.groups.push_back({.hyper = {0.5}});
  for (uint32_t t = 0; t < kTensors; ++t) {
    TensorSpec tensor;
    tensor.name = absl::StrCat("t", t);
    tensor.elements = 5 + t;
    tensor.gradient_format = kernels::FindWireFormat("fp32");
    spec.tensors.push_back(tensor);
  }
  spec.checkpoints = CheckpointSettings{.durability = DurabilityMode::kJournalSync, .journal_steps = 2};
  return spec;
}

// --- the writer -----------------------------------------------------------------------------------------------------

// Builds the folder. Frames are sealed as the daemon's are.
class Folder {
 public:
  Folder() {
    Require(fs_.MakeFolder("/r").ok() && fs_.MakeFolder(kFolder).ok(), "there are no folders");
    BeginFile();
  }
  ModelFs* fs() { return &fs_; }

  void Say(const std::string& text) {
    if (stream_.size() + text.size() <= kMostStream) stream_ += text;
  }
  void Seal(uint64_t synced) {
    constexpr size_t kRoom = FrameHeader::kBytes + kMostStream + OutputFile::kDirect;
    std::vector<std::byte> block(kRoom);
    std::memcpy(block.data() + FrameHeader::kBytes, stream_.data(), stream_.size());
    const uint64_t bytes = SealFrame({.segment = number_, .sequence = sequence_++, .synced = synced},
                                     absl::MakeSpan(block), static_cast<uint32_t>(stream_.size()));
    content_.append(reinterpret_cast<const char*>(block.data()), bytes);
    stream_.clear();
  }
  void Flip(uint64_t bit) {
    if (content_.empty()) return;
    char& byte = content_[bit / 8 % content_.size()];
    byte = static_cast<char>(byte ^ (1 << bit % 8));
  }
  void Cut(uint64_t bytes) { content_.resize(content_.size() - std::min<size_t>(content_.size(), bytes)); }
  void BeginFile() {
    if (number_ == kMostFiles) return;
    if (number_ > 0) Finish();
    ++number_;
    sequence_ = 0;
  }
  void Finish() {
    if (!stream_.empty()) Seal(0);
    const auto file = fs_.Create(absl::StrCat(kFolder, "/", SegmentName(number_)));
    const auto* const bytes = reinterpret_cast<const std::byte*>(content_.data());
    Require(file.ok() && (*file)->Write(0, {bytes, content_.size()}).ok(), "a file of it cannot be made");
    content_.clear();
  }

 private:
  ModelFs fs_;
  uint64_t number_ = 0, sequence_ = 0;
  std::string stream_, content_;
};

void Head(Input* in, Folder* folder) {
  SegmentHead head{.run_id = "r", .spec_sha256 = "s", .base = kBase + in->Below(4)};
  if (in->Below(2) == 1) head.continues = kBase + in->Below(4);
  head.after_step = kBaseStep + in->Below(8);
  folder->Say(HeadText(head));
}

void Update(Input* in, Folder* folder) {
  JournaledUpdate update{.step = kBaseStep + in->Below(8), .tensor = in->Below(kTensors + 1), .hyper = {0.5}};
  update.gradient_format = in->Below(16) == 0 ? "bf16" : "fp32";
  const uint64_t wanted = (5 + update.tensor) * sizeof(float);
  const uint64_t bytes = in->Below(16) == 0 ? in->Take<uint64_t>() : wanted;
  folder->Say(HeadText(JournalRecord{std::move(update), bytes}));
  folder->Say(std::string(wanted, 'g'));
}

void End(Input* in, Folder* folder) {
  const uint32_t body = in->Below(32);
  const uint64_t run_bytes = in->Below(8) == 0 ? in->Take<uint64_t>() : body;
  const uint64_t body_bytes = in->Below(16) == 0 ? in->Take<uint64_t>() : body;
  folder->Say(HeadText(JournalRecord{JournaledEnd{kBaseStep + in->Below(8), run_bytes}, body_bytes}));
  folder->Say(std::string(body, 'e'));
}

void Act(Input* in, Folder* folder) {
  switch (in->Below(9)) {
    case 0:
      return Head(in, folder);
    case 1:
    case 2:
      return Update(in, folder);
    case 3:
      return End(in, folder);
    case 4:
      return folder->Say(HeadText(JournalRecord{JournaledRewind{kBaseStep - 1 + in->Below(8), in->Take<uint8_t>()}}));
    case 5:
      return folder->Seal(in->Below(8));
    case 6:
      return folder->BeginFile();
    case 7:
      return in->Below(4) == 0 ? folder->Flip(in->Take<uint32_t>()) : folder->Cut(in->Take<uint16_t>());
    default:
      return folder->Say(std::string(1, static_cast<char>(in->Take<uint8_t>())));
  }
}

// --- the reader -----------------------------------------------------------------------------------------------------

void Replay(ModelFs* fs, const JournalSurvey& survey) {
  static const auto* const spec = new RunSpec(Spec());
  std::vector<std::vector<std::byte>> room;
  for (const TensorSpec& tensor : spec->tensors) room.emplace_back(tensor.elements * sizeof(float));
  CheckpointCodec codec;
  codec.read_run_bytes = [](const RunSpec&, const std::string& bytes, const std::string&) {
    CheckpointedRun run;
    run.figures.generation = bytes.size();
    return run;
  };
  const auto run = ReplayJournal({.fs = fs,
                                  .spec = spec,
                                  .codec = &codec,
                                  .room = [&](uint32_t tensor) { return absl::MakeSpan(room.at(tensor)); },
                                  .update =
                                      [&](const JournaledUpdate& update) {
                                        Require(update.tensor < kTensors, "there is no such tensor");
                                        Require(update.hyper.size() == 1, "its settings are another group's");
                                      }},
                                 survey);
  if (!run.ok()) RequireSaid(run.status());
}

void Read(ModelFs* fs) {
  auto chain = JournalChain(fs, kFolder, kBase);
  if (!chain.ok()) return RequireSaid(chain.status());
  const auto survey = SurveyJournal(fs, *std::move(chain), kBaseStep);
  if (!survey.ok()) return RequireSaid(survey.status());
  Require(survey->step >= kBaseStep, "it leads back before the checkpoint");
  Require(survey->steps == survey->step - kBaseStep, "steps are missing");
  if (survey->steps > 0) Replay(fs, *survey);
}

void RunOne(Input in) {
  Folder folder;
  folder.Say(HeadText(SegmentHead{.run_id = "r", .spec_sha256 = "s", .base = kBase, .after_step = kBaseStep}));
  folder.Seal(0);
  while (in.left() > 0) Act(&in, &folder);
  folder.Finish();
  Read(folder.fs());
}

}  // namespace
}  // namespace ballast::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  ballast::fuzz::RunOne({data, size});
  return 0;
}
