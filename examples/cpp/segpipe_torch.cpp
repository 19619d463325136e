// Repeats the golden answers of an exported folder with libtorch on one CPU thread.
//   segpipe_torch FOLDER [RUNS]     exit code 0 ok, 2 usage, 4 different answers, 7 altered files
#include <ATen/Parallel.h>
#include <torch/script.h>

#include <memory>
#include <sstream>

#include "artifact.hpp"

static std::string bytes_of(const c10::IValue& value) {
  const at::Tensor tensor = value.toTensor().contiguous();
  if (tensor.scalar_type() != torch::kUInt8) throw std::runtime_error("uint8 outputs were needed");
  return {static_cast<const char*>(tensor.data_ptr()), static_cast<size_t>(tensor.numel())};
}

static segpipe::Model open_model(const std::string& bytes, const segpipe::Golden& golden) {
  at::set_num_threads(1);
  torch::jit::ExtraFilesMap inside{{"manifest.json", ""}};
  std::istringstream file(bytes);
  const auto module = std::make_shared<torch::jit::Module>(torch::jit::load(file, torch::kCPU, inside));
  std::vector<int64_t> shape = golden[0].shape;
  shape[0] = 1;
  return {inside["manifest.json"], [module, shape](const uint8_t* image) {
            const c10::InferenceMode guard;
            // A view. torch does not take const pointers, but the network does not write to its input.
            const at::Tensor input = torch::from_blob(const_cast<uint8_t*>(image), shape, torch::kUInt8);
            const auto answer = module->forward({input}).toTuple();
            return segpipe::Answer{bytes_of(answer->elements().at(0)), bytes_of(answer->elements().at(1))};
          }};
}

int main(int argc, char** argv) { return segpipe::self_test(argc, argv, "model.torchscript.pt", open_model); }
