// Repeats the golden answers of an exported folder with ONNX Runtime on one CPU thread.
//   segpipe_ort FOLDER [RUNS]       exit code 0 ok, 2 usage, 4 different answers, 7 altered files
#include <onnxruntime_cxx_api.h>

#include <memory>

#include "artifact.hpp"

static Ort::Value tensor_of(const void* bytes, size_t size, std::vector<int64_t> shape) {
  static const auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
  shape[0] = 1;
  // A view. The API does not take const pointers, but does not write to inputs.
  auto* start = static_cast<uint8_t*>(const_cast<void*>(bytes));
  return Ort::Value::CreateTensor<uint8_t>(memory, start, size, shape.data(), shape.size());
}

static segpipe::Model open_model(const std::string& bytes, const segpipe::Golden& golden) {
  setenv("ORT_DISABLE_TELEMETRY", "1", 0);  // official builds send some from 1.29 on
  static Ort::Env env(ORT_LOGGING_LEVEL_FATAL, "segpipe");
  Ort::SessionOptions options;
  // Waiting threads sleep.
  options.SetIntraOpNumThreads(1).SetInterOpNumThreads(1).AddConfigEntry("session.intra_op.allow_spinning", "0");
  const auto session = std::make_shared<Ort::Session>(env, bytes.data(), bytes.size(), options);
  Ort::AllocatorWithDefaultOptions allocator;
  const auto inside = session->GetModelMetadata().LookupCustomMetadataMapAllocated("segpipe", allocator);
  return {inside ? inside.get() : "", [session, &golden](const uint8_t* image) {
            segpipe::Answer answer{std::string(golden[1].size(), '\0'), std::string(golden[2].size(), '\0')};
            const char* const names[] = {"image", "mask", "confidence"};
            const Ort::Value input = tensor_of(image, golden[0].size(), golden[0].shape);
            Ort::Value outputs[] = {tensor_of(answer.mask.data(), answer.mask.size(), golden[1].shape),
                                    tensor_of(answer.confidence.data(), answer.confidence.size(), golden[2].shape)};
            session->Run(Ort::RunOptions{nullptr}, names, &input, 1, names + 1, outputs, 2);
            return answer;
          }};
}

int main(int argc, char** argv) { return segpipe::self_test(argc, argv, "model.onnx", open_model); }
