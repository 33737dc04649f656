#include "server/storage/journal_record.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

#include "ballast/v1/journal.pb.h"
#include "server/base/status_macros.h"
#include "server/storage/damage.h"

namespace ballast {
namespace {

constexpr uint32_t kJournalFormat = 1;

void Fill(const JournaledUpdate& update, v1::JournalRecord* record) {
  v1::JournalUpdate* const out = record->mutable_update();
  out->set_step(update.step);
  out->set_tensor(update.tensor);
  out->set_gradient_divisor(update.gradient_divisor);
  out->set_clip(update.clip);
  out->set_statistics(update.full_statistics ? 1 : 0);
  out->mutable_hyper()->Assign(update.hyper.begin(), update.hyper.end());
  out->set_gradient_format(update.gradient_format);
}

void Fill(const JournaledEnd& end, v1::JournalRecord* record) {
  record->mutable_closed()->set_step(end.step);
  record->mutable_closed()->set_run_bytes(end.run_bytes);
  record->mutable_closed()->set_averaged(end.averaged);
}

void Fill(const JournaledRewind& rewind, v1::JournalRecord* record) {
  record->mutable_rewound()->set_to_step(rewind.to_step);
  record->mutable_rewound()->set_generation(rewind.generation);
}

JournaledUpdate FromMessage(const v1::JournalUpdate& update) {
  return {.step = update.step(),
          .tensor = update.tensor(),
          .gradient_divisor = update.gradient_divisor(),
          .clip = update.clip(),
          .full_statistics = update.statistics() != 0,
          .hyper = {update.hyper().begin(), update.hyper().end()},
          .gradient_format = update.gradient_format()};
}

std::string WithLength(const std::string& head) {
  const auto bytes = static_cast<uint32_t>(head.size());
  std::string text(sizeof(bytes), '\0');
  std::memcpy(text.data(), &bytes, sizeof(bytes));
  return text + head;
}

}  // namespace

std::string HeadText(const JournalRecord& record) {
  v1::JournalRecord out;
  std::visit([&](const auto& what) { Fill(what, &out); }, record.what);
  out.set_body_bytes(record.body_bytes);
  return WithLength(out.SerializeAsString());
}

std::string HeadText(const SegmentHead& head) {
  v1::JournalRecord record;
  v1::JournalSegment* const out = record.mutable_segment();
  out->set_format(kJournalFormat);
  out->set_run_id(head.run_id);
  out->set_spec_sha256(head.spec_sha256);
  out->set_base(head.base);
  out->set_continues(head.continues);
  out->set_after_step(head.after_step);
  out->set_numerics(head.numerics);
  out->set_products(head.products);
  return WithLength(record.SerializeAsString());
}

absl::StatusOr<JournalRecord> ParseRecord(const std::string& text, const std::string& file) {
  v1::JournalRecord in;
  if (!in.ParseFromString(text)) return absl::InvalidArgumentError("cannot be read");
  RETURN_IF_ERROR(CheckVersion(in, file));
  JournalRecord record{.what = {}, .body_bytes = in.body_bytes()};
  switch (in.what_case()) {
    case v1::JournalRecord::kUpdate:
      record.what = FromMessage(in.update());
      return record;
    case v1::JournalRecord::kClosed:
      record.what = JournaledEnd{in.closed().step(), in.closed().run_bytes(), in.closed().averaged()};
      return record;
    case v1::JournalRecord::kRewound:
      record.what = JournaledRewind{in.rewound().to_step(), in.rewound().generation()};
      return record;
    default:
      return absl::InvalidArgumentError("is of no kind that is known");
  }
}

absl::StatusOr<SegmentHead> ParseSegmentHead(const std::string& text, const std::string& file) {
  v1::JournalRecord in;
  if (!in.ParseFromString(text) || !in.has_segment()) {
    return absl::InvalidArgumentError("of another kind comes first");
  }
  const v1::JournalSegment& segment = in.segment();
  if (segment.format() > kJournalFormat) {
    return OfLaterVersion(file, absl::StrCat("has format ", segment.format(), "; this daemon reads ", kJournalFormat,
                                             ": start the version that wrote it"));
  }
  RETURN_IF_ERROR(CheckVersion(in, file));
  return SegmentHead{.run_id = segment.run_id(),
                     .spec_sha256 = segment.spec_sha256(),
                     .base = segment.base(),
                     .continues = segment.continues(),
                     .after_step = segment.after_step(),
                     .numerics = std::max(segment.numerics(), 1u),  // the first edition did not say
                     .products = segment.products()};
}

}  // namespace ballast
